"""A scheduler and a kubelet for the tests: one node, whose pods either do as they are told, or run.

What a kubelet shows to the API server is the same in both cases: bindings, phases, readiness, exit codes,
restarts, logs through the API server's own way to the node, and the end of pods that are deleted.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kube_api import Api

NODE = "node-0"
_POLL_S = 0.05
_GRACE_S = 8.0
_CLAIM_PORT = 4222  # any; it is bound, so that nobody else takes the network
_PROBE_S = 0.3

Runner = Callable[["Container"], "Process"]


class ApiError(Exception):
    """An answer that is none of 2xx."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Process(Protocol):
    """What runs in a container."""

    message: str

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""

    @property
    def log(self) -> str: ...

    def is_ready(self, probe: Mapping[str, Any] | None) -> bool:
        """`probe`: the container's readiness probe."""

    def terminate(self) -> None:
        """SIGTERM, without waiting."""

    def stop(self, grace_s: float) -> None: ...


class ScriptedProcess:
    """Does what the test says: see FakeKubelet.finish and write_log."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.message = ""
        self.log = ""

    def is_ready(self, _probe: Mapping[str, Any] | None) -> bool:
        return True

    def terminate(self) -> None:
        if self.exit_code is None:
            self.exit_code = 143

    def stop(self, _grace_s: float) -> None:
        self.terminate()


@dataclass
class Container:
    """A container as a runtime sees it."""

    pod: str
    command: list[str]
    env: dict[str, str]
    ip: str
    number: int  # 0 at first, one more with each restart


@dataclass
class _Pod:
    manifest: Mapping[str, Any]
    ip: str
    process: Process
    secrets: dict[str, str]
    restarts: int = 0
    last_state: dict[str, Any] = field(default_factory=dict)
    reported: Any = None
    kill_at: float | None = None  # of a pod that is deleted: when its grace is over


class Network:
    """Addresses of loopback, which has sixteen million of them, that no other test run uses at the time."""

    def __init__(self) -> None:
        for second in random.sample(range(1, 255), 254):
            self._prefix = f"127.{second}"
            self._claim = socket.socket()
            try:
                self._claim.bind((f"{self._prefix}.255.1", _CLAIM_PORT))
                return
            except OSError:
                self._claim.close()
        raise RuntimeError("all networks of loopback are in use")

    def address(self, number: int) -> str:
        return f"{self._prefix}.{number // 250}.{number % 250 + 1}"

    def close(self) -> None:
        self._claim.close()


class FakeKubelet:
    """Runs on a thread of its own. `processes` are those of the pods by namespace and pod name."""

    def __init__(self, api: Api, folder: Path, namespaces: Sequence[str]) -> None:
        """`namespaces`: whose pods it runs; there may be leftovers of other tests in others."""
        self._api = api
        self._folder = folder
        self.namespaces = list(namespaces)
        self.runner: Runner = lambda _container: ScriptedProcess()
        self._pods: dict[str, _Pod] = {}  # by uid
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kubelet", daemon=True)
        self._network = Network()
        self.failure: BaseException | None = None

    def __enter__(self) -> FakeKubelet:
        self._log_server = _LogServer(self._folder, self.log)
        self._register()
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._stop.set()
        self._thread.join(120)
        for pod in self._pods.values():
            pod.process.terminate()  # all together, and then each
        for pod in self._pods.values():
            pod.process.stop(_GRACE_S)
        self._log_server.close()
        self._network.close()

    def finish(self, pod: str, exit_code: int = 0, message: str = "") -> None:
        """Ends the container of a pod that runs."""
        process = self._find(pod).process
        assert isinstance(process, ScriptedProcess)
        process.message = message
        process.exit_code = exit_code

    def has(self, pod: str) -> bool:
        """Whether it has started this pod, which still is."""
        with self._lock:
            return any(_name(p.manifest) == pod for p in self._pods.values())

    def write_log(self, pod: str, text: str) -> None:
        process = self._find(pod).process
        assert isinstance(process, ScriptedProcess)
        process.log += text

    def log(self, pod: str) -> str:
        return self._find(pod).process.log

    def refresh_secrets(self) -> None:
        """Writes the Secrets of all pods again, as a kubelet does within a minute of a change."""
        with self._lock:
            pods = list(self._pods.values())
        for pod in pods:
            self._mount_secrets(pod.manifest)

    def address(self, pod: str) -> str:
        """The pod's address, the same for all pods of this name, and known before they are: what DNS says."""
        with self._lock:
            number = self._numbers.setdefault(pod, len(self._numbers))
        return self._network.address(number)

    def _find(self, pod: str) -> _Pod:
        with self._lock:
            return next(p for p in reversed(self._pods.values()) if _name(p.manifest) == pod)

    def _register(self) -> None:
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._log_server.port}},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        self._call("POST", "/api/v1/nodes", {"metadata": {"name": NODE}, "status": status})

    def _loop(self) -> None:
        try:
            while not self._stop.wait(_POLL_S):
                paths = [f"/api/v1/namespaces/{namespace}/pods" for namespace in self.namespaces]
                self._sync([item for path in paths for item in self._call("GET", path)["items"]])
        except BaseException as error:
            if not self._stop.is_set():
                self.failure = error
                raise

    def _sync(self, manifests: list[dict[str, Any]]) -> None:
        for manifest in manifests:
            try:
                self._sync_pod(manifest)
            except ApiError as error:
                if error.status not in (404, 409):  # deleted or changed meanwhile: seen at the next look
                    raise
        uids = {manifest["metadata"]["uid"] for manifest in manifests}
        with self._lock:
            gone = [self._pods.pop(uid) for uid in list(self._pods) if uid not in uids]
        for pod in gone:
            pod.process.stop(0.0)

    def _sync_pod(self, manifest: dict[str, Any]) -> None:
        metadata = manifest["metadata"]
        if metadata.get("deletionTimestamp"):
            self._end(manifest)
            return
        if not manifest["spec"].get("nodeName"):
            self._bind(metadata)
        pod = self._pods.get(metadata["uid"])
        if pod is None:
            if manifest.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                return
            pod = self._start(manifest)
        self._restart_if_asked(pod)
        self._report(pod)

    def _bind(self, metadata: Mapping[str, Any]) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"]},
            "target": {"kind": "Node", "name": NODE},
        }
        self._call("POST", f"{_path(metadata)}/binding", body)

    def _start(self, manifest: Mapping[str, Any]) -> _Pod:
        ip = self.address(_name(manifest))
        secrets = self._mount_secrets(manifest)
        process = self.runner(_container(manifest, ip, 0, secrets))
        pod = _Pod(manifest=manifest, ip=ip, process=process, secrets=secrets)
        with self._lock:
            self._pods[manifest["metadata"]["uid"]] = pod
        return pod

    def _mount_secrets(self, manifest: Mapping[str, Any]) -> dict[str, str]:
        """Writes the pod's Secrets into folders; returns these by the path in the container."""
        mounts = {
            m["name"]: m["mountPath"] for m in manifest["spec"]["containers"][0].get("volumeMounts", [])
        }
        folders = {}
        for volume in manifest["spec"].get("volumes", []):
            if "secret" in volume and volume["name"] in mounts:
                secret = volume["secret"]
                namespace = manifest["metadata"]["namespace"]
                data = self._call("GET", f"/api/v1/namespaces/{namespace}/secrets/{secret['secretName']}")[
                    "data"
                ]
                folder = self._folder / f"{manifest['metadata']['uid']}-{volume['name']}"
                folder.mkdir(exist_ok=True)
                for item in secret.get("items", [{"key": key, "path": key} for key in data]):
                    # By a rename, as a kubelet changes the files of a pod that runs.
                    path, written = folder / item["path"], folder / f".{item['path']}"
                    written.write_bytes(base64.b64decode(data[item["key"]]))
                    written.chmod(secret["defaultMode"])
                    written.replace(path)
                folders[mounts[volume["name"]]] = str(folder)
        return folders

    def _restart_if_asked(self, pod: _Pod) -> None:
        if pod.process.exit_code is None or pod.manifest["spec"]["restartPolicy"] != "Always":
            return
        pod.last_state = {"terminated": _terminated(pod.process)}
        pod.restarts += 1
        pod.process = self.runner(_container(pod.manifest, pod.ip, pod.restarts, pod.secrets))

    def _report(self, pod: _Pod) -> None:
        status = _status(pod)
        if status == pod.reported:
            return
        self._call("PATCH", f"{_path(pod.manifest['metadata'])}/status", {"status": status})
        pod.reported = status

    def _end(self, manifest: Mapping[str, Any]) -> None:
        """Does not wait: other pods live on while this one ends."""
        pod = self._pods.get(manifest["metadata"]["uid"])
        if pod is not None and pod.kill_at is None:
            pod.kill_at = time.monotonic() + manifest["metadata"]["deletionGracePeriodSeconds"]
            pod.process.terminate()
        if pod is not None and pod.process.exit_code is None:
            if time.monotonic() < pod.kill_at:
                return
            pod.process.stop(0.0)
        self._call("DELETE", _path(manifest["metadata"]), {"gracePeriodSeconds": 0})

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        status, answer = self._api.request(method, path, body, kind)
        if not 200 <= status < 300:
            raise ApiError(status, str(answer.get("message")))
        return answer


def _name(manifest: Mapping[str, Any]) -> str:
    return str(manifest["metadata"]["name"])


def _path(metadata: Mapping[str, Any]) -> str:
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def _container(manifest: Mapping[str, Any], ip: str, number: int, mounts: Mapping[str, str]) -> Container:
    """The environment and command as a kubelet makes them: fields filled in, $(NAME) replaced."""
    spec = manifest["spec"]["containers"][0]
    fields = {"metadata.name": _name(manifest), "status.podIP": ip}
    env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}  # of the API server's Service, which every pod has
    for variable in spec.get("env", []):
        if "valueFrom" in variable:
            env[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            env[variable["name"]] = _expand(variable.get("value", ""), env)
    for path, folder in mounts.items():
        env = {name: re.sub(rf"^{path}(?=/|$)", folder, value) for name, value in env.items()}
    command = [_expand(word, env) for word in spec["command"]]
    return Container(pod=_name(manifest), command=command, env=env, ip=ip, number=number)


def _probe(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """The readiness probe, with the number of its port for the name."""
    ports = {port["name"]: port["containerPort"] for port in spec.get("ports", [])}
    probe = spec.get("readinessProbe", {})
    for kind in ("httpGet", "tcpSocket"):
        if kind in probe:
            return {kind: {**probe[kind], "port": ports[probe[kind]["port"]]}}
    return None


def _expand(text: str, env: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), text)


def _terminated(process: Process) -> dict[str, Any]:
    code = process.exit_code
    return {
        "exitCode": code,
        "reason": "Completed" if code == 0 else "Error",
        "message": process.message or ("" if code == 0 else process.log[-1000:]),
    }


def _status(pod: _Pod) -> dict[str, Any]:
    process, spec = pod.process, pod.manifest["spec"]["containers"][0]
    exit_code = process.exit_code
    is_ready = exit_code is None and process.is_ready(_probe(spec))
    if exit_code is None:
        phase, state = "Running", {"running": {}}
    else:
        phase, state = ("Succeeded" if exit_code == 0 else "Failed"), {"terminated": _terminated(process)}
    return {
        "phase": phase,
        "podIP": pod.ip,
        "conditions": [{"type": "Ready", "status": str(is_ready)}],
        "containerStatuses": [
            {
                "name": spec["name"],
                "image": spec["image"],
                "imageID": "",
                "ready": is_ready,
                "restartCount": pod.restarts,
                "state": {"running": None, "terminated": None, **state},
                "lastState": pod.last_state,
            }
        ],
    }


class _LogServer:
    """What the API server asks a kubelet for logs: HTTPS, with a certificate that nobody has signed."""

    def __init__(self, folder: Path, log: Callable[[str], str]) -> None:
        certificate, key = folder / "kubelet.crt", folder / "kubelet.key"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-nodes", "-days", "2"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-subj", "/CN=kubelet", "-keyout", str(key), "-out", str(certificate)),
            ],
            check=True,
            capture_output=True,
        )

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                match = re.fullmatch(r"/containerLogs/[^/]+/([^/]+)/[^/?]+(?:\?(.*))?", self.path)
                lines = log(match[1]).splitlines(keepends=True) if match else []
                tail = re.search(r"tailLines=(\d+)", (match and match[2]) or "")
                self.send_response(200)
                self.end_headers()
                self.wfile.write("".join(lines[-int(tail[1]) :] if tail else lines).encode())

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class LocalProcess:
    """Runs the container's command on this machine, its port at the pod's own loopback address."""

    message = ""

    def __init__(self, container: Container, folder: Path, env: Mapping[str, str]) -> None:
        self._ip = container.ip
        self._is_ready, self._probe_at = False, 0.0
        self._path = folder / f"{container.pod}.{container.number}.log"
        with self._path.open("ab") as log:
            self._popen = subprocess.Popen(
                container.command,
                env={**env, **container.env},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        code = self._popen.poll()
        # As a container runtime says it.
        return code if code is None or code >= 0 else 128 - code

    @property
    def log(self) -> str:
        return self._path.read_text(errors="replace")

    def is_ready(self, probe: Mapping[str, Any] | None) -> bool:
        if probe is None:
            return True
        if time.monotonic() >= self._probe_at:
            self._is_ready = self._passes(probe)
            self._probe_at = time.monotonic() + _PROBE_S
        return self._is_ready

    def _passes(self, probe: Mapping[str, Any]) -> bool:
        try:
            if "httpGet" in probe:
                url = f"http://{self._ip}:{probe['httpGet']['port']}{probe['httpGet']['path']}"
                with urllib.request.urlopen(url, timeout=3) as answer:
                    return bool(answer.status == 200)
            with socket.create_connection((self._ip, probe["tcpSocket"]["port"]), timeout=1):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """As the kernel does when memory is short."""
        os.killpg(self._popen.pid, signal.SIGKILL)

    def terminate(self) -> None:
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGTERM)

    def stop(self, grace_s: float) -> None:
        for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            if self._popen.poll() is not None:
                return
            os.killpg(self._popen.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(seconds)
