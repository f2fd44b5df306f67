"""A real Kubernetes control plane on loopback: etcd, API server, and the controllers that the tests need.

Binaries are looked for in KUBEBUILDER_ASSETS, as envtest does, or in build/kubebuilder, which `./run
kubebuilder` fills; then in the PATH. There is no scheduler and no kubelet: see kubelet.py.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

import yaml

from tests.ports import free_port

ADMIN = "admin-token"
OPERATOR = "operator-token"
SERVER = "server-token"
NARROW = "narrow-token"  # has no rights but those that a test binds to it, by the name of the token
# Service accounts of the manifests in k8s/deploy: what these tokens may do is what the manifests allow.
_USERS = f"""\
{ADMIN},admin,admin,system:masters
{OPERATOR},system:serviceaccount:persia-system:persia-operator,operator,system:authenticated
{SERVER},system:serviceaccount:persia-system:persia-server,server,system:authenticated
{NARROW},{NARROW},{NARROW},system:authenticated
"""
_PREPARED = Path(__file__).resolve().parents[2] / "build" / "kubebuilder"
_BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager")
_CONTROLLERS = "statefulset,garbagecollector,disruption,namespace,endpoint,horizontalpodautoscaling"
_START_S = 180.0


def search_path() -> str:
    """Where programs are looked for."""
    folder = os.environ.get("KUBEBUILDER_ASSETS") or str(_PREPARED)
    return os.pathsep.join([folder, os.environ.get("PATH", "")])


def find_binaries() -> dict[str, str] | str:
    """Paths by name, or what is missing."""
    paths = {name: shutil.which(name, path=search_path()) for name in _BINARIES}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        return f"no {', '.join(missing)}: `./run extras` installs them, or set KUBEBUILDER_ASSETS"
    return {name: str(path) for name, path in paths.items()}


class ControlPlane:
    """Use as a context manager. `kubeconfig(token)` gives a file for a user."""

    def __init__(self, folder: Path, binaries: dict[str, str]) -> None:
        self._folder = folder
        self._binaries = binaries
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = self.etcd = ""
        self.authority = folder / "certs" / "apiserver.crt"  # written by the API server: its own

    def __enter__(self) -> ControlPlane:
        try:
            self._start_etcd()
            self._start_api_server()
            self._await_ready()
            self._start_controllers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for process in reversed(self._processes):  # nothing that anybody will read again
            process.kill()
            process.wait()

    def kubeconfig(self, token: str) -> Path:
        """A kubeconfig for the user of `token`."""
        path = self._folder / f"{token}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.authority)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def _start(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            command = [self._binaries[name], *arguments]
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder)
            )

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._start(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        self.etcd = client

    def _start_api_server(self) -> None:
        key = self._folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        (self._folder / "tokens.csv").write_text(_USERS)
        port = free_port()
        self.url = f"https://127.0.0.1:{port}"
        self._start(
            "kube-apiserver",
            f"--etcd-servers={self.etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={self._folder / 'certs'}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
            *self._front_proxy(),
        )

    def _front_proxy(self) -> list[str]:
        """How the server tells other API servers, to which it forwards requests, who the user is."""
        certificate, key = self._folder / "front-proxy.crt", self._folder / "front-proxy.key"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=front-proxy"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-keyout", str(key), "-out", str(certificate)),
            ],
            check=True,
            capture_output=True,
        )
        return [
            f"--requestheader-client-ca-file={certificate}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={certificate}",
            f"--proxy-client-key-file={key}",
        ]

    def _start_controllers(self) -> None:
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig(ADMIN)}",
            f"--controllers={_CONTROLLERS}",
            "--leader-elect=false",
            "--horizontal-pod-autoscaler-sync-period=1s",
            f"--secure-port={free_port()}",
            "--bind-address=127.0.0.1",
            "--port=0",
            f"--cert-dir={self._folder / 'controller-certs'}",
        )

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {ADMIN}"})
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self._processes):
                break
            try:
                context = ssl.create_default_context(cafile=str(self.authority))
                with urllib.request.urlopen(request, timeout=5, context=context):
                    return
            except OSError:
                time.sleep(0.1)
        logs = "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))
        raise RuntimeError(f"the API server is not ready after {_START_S:g} s:\n{logs}")
