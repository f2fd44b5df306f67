"""`persia-launcher serve` with a token and with certificates, over gRPC and HTTP, as clients meet it."""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from persia import env
from persia.security import certificates, serve_token
from persia.security.tls import TlsFiles
from persia.serving.protocol import message
from tests.ports import free_port

from .test_serving import SLOTS, START_S, Served, dump, make_batch

GOOD = make_batch([10, 20], dense=0.5)
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"):
        patch.delenv(name, raising=False)
    env.reload_env()
    folder = tmp_path_factory.mktemp("access")
    (folder / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS))
    dump(folder / "model", factor=2.0, step=7)
    yield folder
    patch.undo()
    env.reload_env()


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[Served, str]]]:
    """Starts a server with options: it, and the address of its HTTP port."""
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> tuple[Served, str]:
            http_port = free_port()
            config = str(model / "embedding_config.yml")
            arguments = (str(model / "model"), "--embedding-config", config, "--http-port", str(http_port))
            served = Served(tmp_path, *arguments, *options, wait=False)
            stack.callback(served.stop)
            served.wait_until(lambda: "Open Inference Protocol" in served.log.read_text())
            return served, f"127.0.0.1:{http_port}"

        yield start


def infer(channel: grpc.Channel, token: str | None = None) -> grpc.StatusCode:
    request = message("ModelInferRequest")(model_name="m")
    tensor = request.inputs.add(name="batch", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(GOOD)
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    try:
        channel.unary_unary(INFER)(
            request.SerializeToString(), metadata=metadata, timeout=START_S, wait_for_ready=False
        )
    except grpc.RpcError as failure:
        return failure.code()
    return grpc.StatusCode.OK


def secured(address: str, folder: Path, client: Path | None) -> grpc.Channel:
    """A channel that trusts the CA in `folder`, and shows the certificate in `client`."""
    pair = {}
    if client is not None:
        pair = {
            "private_key": (client / "tls.key").read_bytes(),
            "certificate_chain": (client / "tls.crt").read_bytes(),
        }
    credentials = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes(), **pair)
    options = [("grpc.ssl_target_name_override", "persia"), ("grpc.enable_retries", 0)]
    return grpc.secure_channel(address, credentials, options)


def get(url: str, path: str, token: str | None = None, context: ssl.SSLContext | None = None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(f"{url}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=START_S, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            code, body = error.code, error.read()
    assert code != 401 or "secret token --for serve" in json.loads(body)["error"]
    return code


def test_only_the_token_gets_predictions(serve: Callable[..., Any]) -> None:
    served, http = serve("--require-token")
    token = serve_token()
    with grpc.insecure_channel(served.address) as channel:
        for wrong in (None, "", token[:-1], "0" * 64):
            assert infer(channel, wrong) is grpc.StatusCode.UNAUTHENTICATED
        assert infer(channel, token) is grpc.StatusCode.OK
        reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as refused:
            list(reflection(iter([b""]), timeout=START_S))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # As load balancers and probes ask.
        states = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=START_S)
        assert states.status == health_pb2.HealthCheckResponse.SERVING
        # Strangers could hold all concurrent calls with streams that never end.
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=START_S)
        with pytest.raises(grpc.RpcError) as unwatched:
            next(watch)
        assert unwatched.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert served.client.is_server_live()
        assert served.client.is_server_ready()
    url = f"http://{http}"
    assert [get(url, path) for path in ("/v2/health/live", "/v2/health/ready")] == [200, 200]
    assert [get(url, "/v2/models/m"), get(url, "/v2/models/m", "00"), get(url, "/etc/passwd")] == [401] * 3
    assert get(url, "/v2/models/m", token) == 200
    large = urllib.request.Request(f"{url}/v2/models/m/infer", data=bytes(1 << 20))
    with pytest.raises((urllib.error.HTTPError, ConnectionError)):  # the body may not even be read
        urllib.request.urlopen(large, timeout=START_S).close()


def test_without_options_everybody_on_this_machine_is_answered(serve: Callable[..., Any]) -> None:
    served, http = serve()
    with grpc.insecure_channel(served.address) as channel:
        assert infer(channel) is grpc.StatusCode.OK
        assert infer(channel, "any") is grpc.StatusCode.OK  # a client may send one to all its servers
    assert get(f"http://{http}", "/v2/models/m") == 200
    assert "everybody" not in served.log.read_text()


def test_with_the_jobs_certificates_clients_need_one(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = certificates.create(tmp_path / "job", ["inference", "loader"], days=1)
    (foreign,) = certificates.create(tmp_path / "foreign", ["job"], days=1)
    monkeypatch.setenv("PERSIA_TLS_DIR", str(server))
    served, http = serve("--host", "0.0.0.0", "--require-token")
    with secured(served.address, server, client) as channel:
        assert infer(channel) is grpc.StatusCode.UNAUTHENTICATED  # a certificate is no token
        assert infer(channel, serve_token()) is grpc.StatusCode.OK
    for stranger in (None, foreign):
        with secured(served.address, server, stranger) as channel:
            assert infer(channel, serve_token()) is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(served.address) as channel:
        assert infer(channel, serve_token()) is grpc.StatusCode.UNAVAILABLE
    url, ours = f"https://{http}", TlsFiles.of_folder(client)
    assert get(url, "/v2/models/m", serve_token(), ours.client_context()) == 200
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(OSError):  # noqa: PT011 - an alert or a reset, by who is faster
        get(url, "/v2/health/live", None, theirs)
    with pytest.raises(OSError):  # noqa: PT011
        get(f"http://{http}", "/v2/health/live")


def test_a_certificate_of_its_own_and_its_renewal(serve: Callable[..., Any], tmp_path: Path) -> None:
    """Clients show none, as those of an internal service do."""
    (folder,) = certificates.create(tmp_path / "own", ["inference"], days=1, hosts=["ads.example"])
    served, http = serve("--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key"))
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))  # compares 127.0.0.1
    with secured(served.address, folder, None) as channel:
        assert infer(channel) is grpc.StatusCode.OK
    assert get(f"https://{http}", "/v2/models/m", None, context) == 200
    shown = [certificate_of(address) for address in (served.address, http)]
    assert shown[0] == shown[1]
    certificates.create(tmp_path / "own", ["inference"], days=2, replace=True)
    deadline = time.monotonic() + START_S
    for address in (served.address, http):
        while certificate_of(address) == shown[0]:
            assert time.monotonic() < deadline, "the old certificate is still shown"
            time.sleep(0.1)
    with secured(served.address, folder, None) as channel:
        assert infer(channel) is grpc.StatusCode.OK


def certificate_of(address: str) -> str:
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=START_S)


def test_a_key_without_its_certificate(model: Path) -> None:
    command = [sys.executable, "-m", "persia.launcher", "serve", str(model / "model"), "--tls-key", "tls.key"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert result.returncode == 1
    assert "--tls-cert and --tls-key need each other" in result.stderr
