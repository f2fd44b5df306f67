"""The REST service as a process, with the rights of its service account, at a real API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

import urllib3
from click.testing import CliRunner
from control_plane import SERVER, ControlPlane
from harness import Namespace, OperatorProcess, job_manifest, wait_until
from kubelet import FakeKubelet
from persia_k8s.cli import cli
from persia_k8s.openapi import openapi_document

TOKEN = "a-token-of-some-length"


class Service:
    """Requests to the service."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = urllib3.PoolManager()

    def call(self, method: str, path: str, body: Any = None, token: str | None = TOKEN) -> tuple[int, Any]:
        response = self._pool.request(
            method,
            self._url + path,
            body=body if isinstance(body, (bytes, type(None))) else json.dumps(body),
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=240,
            retries=False,
        )
        return response.status, json.loads(response.data)


@pytest.fixture(scope="module")
def service(
    control_plane: ControlPlane, kube: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "token").write_text(f"{TOKEN}\n")
    log = folder / "server.log"
    command = [sys.executable, "-m", "persia_k8s.cli", "server", "--host", "127.0.0.1", "--port", "0"]
    env = {**os.environ, "KUBECONFIG": str(control_plane.kubeconfig(SERVER))}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--token-file", str(folder / "token")],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = wait_until(lambda: _url(process, log), 120, "the service is up")
        yield Service(url)
    finally:
        process.terminate()
        assert process.wait(120) == 0, log.read_text()


def _url(process: subprocess.Popen[bytes], log: Path) -> str | None:
    assert process.poll() is None, log.read_text()
    words = log.read_text().split()
    return next((word.rstrip("/") for word in words if word.startswith("http://")), None)


def test_a_job_from_apply_to_delete(
    service: Service, namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    name = namespace.name
    identifier = {"job_name": "job", "namespace": name}
    spec = job_manifest()["spec"]
    assert service.call("POST", "/apply", {"job_identifier": identifier, "spec": spec}) == (
        200,
        {"success": True, "err_msg": None},
    )
    namespace.await_phase("job", "Running")
    code, answer = service.call("GET", f"/listjobs?namespace={name}")
    assert code == 200
    assert answer["execution_results"] == {"success": True, "err_msg": None}
    assert answer["resources"] == [{"name": "job", "namespace": name, "phase": "Running"}]

    # As published: a GET with a JSON body.
    _, answer = service.call("GET", "/listpods", identifier)
    pods = {pod["name"]: pod for pod in answer["resources"]}
    assert pods["job-nn-worker-0"] == {
        "name": "job-nn-worker-0",
        "namespace": name,
        "phase": "Running",
        "job_name": "job",
    }
    assert len(pods) == 5
    _, answer = service.call("GET", "/podstatus", {"pod_name": "job-nn-worker-0", "namespace": name})
    assert answer["body"]["containerStatuses"][0]["ready"] is True

    kubelet.write_log("job-nn-worker-0", '{"not": "parsed"}\nlast\n')
    _, answer = service.call("GET", f"/podlog?namespace={name}&pod_name=job-nn-worker-0")
    assert answer["body"] == '{"not": "parsed"}\nlast\n'
    _, answer = service.call("GET", f"/podlog?namespace={name}&pod_name=job-nn-worker-0&tail_lines=1")
    assert answer["body"] == "last\n"

    changed = {"job_identifier": identifier, "spec": {**spec, "logLevel": "debug"}}
    assert service.call("POST", "/apply", changed)[0] == 200
    assert (namespace.get("persiajobs", "job") or {})["spec"]["logLevel"] == "debug"

    assert service.call("POST", "/delete", identifier)[0] == 200
    namespace.await_(lambda: not namespace.list("pods"), "the pods are gone")


def test_refusals_of_the_api_server_reach_the_caller(service: Service, namespace: Namespace) -> None:
    body = {
        "job_identifier": {"job_name": "job", "namespace": namespace.name},
        "spec": {**job_manifest()["spec"], "logLevel": "loud"},
    }
    code, answer = service.call("POST", "/apply", body)
    assert (code, answer["success"]) == (400, False)
    assert "spec.logLevel" in answer["err_msg"]


@pytest.mark.parametrize("token", [None, "", "a-token-of-some-lengti", TOKEN + "x"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/listjobs"), ("POST", "/apply"), ("GET", "/nothing")])
def test_callers_without_the_token_are_turned_away(
    service: Service, token: str | None, method: str, path: str
) -> None:
    code, answer = service.call(method, path, token=token)
    assert (code, answer["success"]) == (401, False)


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "complaint"),
    [
        ("POST", "/apply", b"{", 400, "not JSON"),
        ("POST", "/apply", [], 400, "must be a JSON object"),
        ("POST", "/apply", {}, 400, "job_identifier"),
        ("POST", "/apply", {"job_identifier": {"job_name": "../x"}, "spec": {}}, 400, "'../x'"),
        ("POST", "/delete", {}, 400, "job_name is None"),
        ("POST", "/delete", {"job_name": "no-such-job"}, 404, "no-such-job"),
        ("GET", "/podstatus", None, 400, "pod_name is None"),
        ("GET", "/podstatus?pod_name=none", None, 404, "none"),
        ("GET", "/podlog?pod_name=none", None, 404, "none"),
        ("GET", "/podlog?pod_name=x&tail_lines=-1", None, 400, "tail_lines is '-1'"),
        ("GET", "/listpods?namespace=a/b", None, 400, "'a/b'"),
        ("GET", "/nothing", None, 404, "Not Found"),
        ("GET", "/apply", None, 405, "Method Not Allowed"),
    ],
)
def test_bad_requests_are_answered_with_the_reason(
    service: Service, method: str, path: str, body: Any, code: int, complaint: str
) -> None:
    status, answer = service.call(method, path, body)
    assert (status, answer["success"]) == (code, False)
    assert complaint in answer["err_msg"]


def test_a_body_that_is_too_large_is_refused(service: Service) -> None:
    status, answer = service.call("POST", "/apply", {"spec": "x" * (2 << 20)})
    assert (status, answer["success"]) == (413, False)


def test_pods_of_nobodys_job_stay_hidden(service: Service, namespace: Namespace) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "other", "namespace": namespace.name},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    namespace.kube.create(pod)
    for path in ("/podstatus", "/podlog"):
        code, answer = service.call("GET", f"{path}?namespace={namespace.name}&pod_name=other")
        assert (code, "belongs to no PersiaJob" in answer["err_msg"]) == (404, True)


def test_the_document_describes_the_service(service: Service) -> None:
    validator = pytest.importorskip("openapi_spec_validator", reason="needs the 'test' extra of k8s/")
    code, document = service.call("GET", "/openapi.json", token=None)
    assert (code, document) == (200, openapi_document())
    validator.validate(document)
    for path, operations in document["paths"].items():
        for method in operations:  # each is there: what it lacks is arguments
            assert service.call(method.upper(), path)[0] in (200, 400), path


@pytest.mark.parametrize(("content", "complaint"), [(None, "cannot be read"), ("short\n", "5 characters")])
def test_a_token_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    result = CliRunner().invoke(cli, ["server", "--token-file", str(path)])
    assert result.exit_code == 1
    assert complaint in result.output
