"""The server of custom resources of a newer Kubernetes, behind the API server of the tests.

`apiextensions-apiserver` is the part of kube-apiserver that serves custom resources. The API server of the
tests forwards requests for PersiaJobs to it (an APIService), so that it validates, prunes, merges and stores
them. It asks the API server who a user is, and what a user may do.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from control_plane import ADMIN, ControlPlane, search_path
from kube_api import Api

from tests.ports import free_port

PROGRAM = "apiextensions-apiserver"
_START_S = 180.0
_KUBECONFIGS = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
# Of resources that the older API server does not have.
_PLUGINS = "ValidatingAdmissionPolicy,MutatingAdmissionPolicy"


def find_program() -> str | None:
    return shutil.which(PROGRAM, path=search_path())


class ExtensionsServer:
    """Use as a context manager. CustomResourceDefinitions of PersiaJob are created at its own `url`."""

    def __init__(self, plane: ControlPlane, program: str, folder: Path) -> None:
        self._plane, self._program, self._folder = plane, program, folder
        self._port = free_port()
        self.url = f"https://localhost:{self._port}"
        self.authority = folder / "apiserver.crt"  # written by the server: its own

    def __enter__(self) -> ExtensionsServer:
        kubeconfig = self._plane.kubeconfig(ADMIN)
        with (self._folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--etcd-servers={self._plane.etcd}",
                    "--bind-address=127.0.0.1",
                    f"--secure-port={self._port}",
                    f"--cert-dir={self._folder}",
                    *(f"--{kind}={kubeconfig}" for kind in _KUBECONFIGS),
                    f"--disable-admission-plugins={_PLUGINS}",
                    "--enable-priority-and-fairness=false",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._await_ready()
            self._register()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._process.kill()
        self._process.wait()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if self.authority.exists():
                api = Api(self.url, ADMIN, self.authority)
                try:
                    if api.get("/readyz")[0] == 200:
                        return
                except OSError:
                    pass
                finally:
                    api.close()
            time.sleep(0.1)
        log = (self._folder / "server.log").read_text()
        raise RuntimeError(f"{PROGRAM} is not ready after {_START_S:g} s:\n{log[-4000:]}")

    def _register(self) -> None:
        """Has the API server of the tests forward what concerns PersiaJobs."""
        api = Api(self._plane.url, ADMIN, self._plane.authority)
        name, namespace = "extensions", "default"
        # Under a name: Endpoints may not have addresses of loopback.
        service = {"type": "ExternalName", "externalName": "localhost"}
        metadata = {"name": name, "namespace": namespace}
        forwarded = {
            "group": "persia.com",
            "version": "v1",
            "groupPriorityMinimum": 1000,
            "versionPriority": 10,
            "service": {**metadata, "port": self._port},
            "insecureSkipTLSVerify": True,
        }
        for path, manifest in (
            (f"/api/v1/namespaces/{namespace}/services", {"metadata": metadata, "spec": service}),
            (
                "/apis/apiregistration.k8s.io/v1/apiservices",
                {"metadata": {"name": "v1.persia.com"}, "spec": forwarded},
            ),
        ):
            status, answer = api.request("POST", path, manifest)
            if status != 201:
                raise RuntimeError(f"{path}: {answer}")
        api.close()
