"""Calls that Python answers end in time, with the status that gRPC wants; also when the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from persia.embedding.data import Label, PersiaBatch, split_batches
from persia.errors import InvalidArgumentError, ResourceExhaustedError, StorageError, UnavailableError
from persia.serving import server
from persia.serving.access import EVERYBODY
from persia.serving.batch_predict import Prediction
from persia.serving.batcher import Batcher, BatchingOptions
from persia.serving.grpc_port import Call, Limits
from persia.serving.inference import Inference
from persia.serving.models import Models
from persia.serving.protocol import CODES, message
from persia.serving.request_log import RequestLog, RequestLogOptions
from persia.serving.server import ServingOptions, _serve
from persia.serving.sideline import Share
from persia.serving.statistics import ServingStatistics
from tests.following import BATCH
from tests.ports import free_port

HEALTH = "/grpc.health.v1.Health"
WAIT_S = 20.0
MAX_REQUESTS = 768
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def may_answer() -> threading.Event:
    return threading.Event()


def model_named(name: str) -> Mock:
    model = Mock(not_ready=lambda: None, signature=None, checked=lambda batch: batch)
    model.settings.name, model.settings.allow_nonfinite = name, False
    return model


@pytest.fixture
def inference(may_answer: threading.Event) -> Iterator[Inference]:
    def predict(batch: PersiaBatch) -> Prediction:
        assert may_answer.wait(WAIT_S)
        return Prediction("1", [np.zeros(batch.batch_size)])

    model = model_named("m")
    batcher = Batcher(predict, BatchingOptions())
    yield Inference(model, batcher, ServingStatistics(), WAIT_S)
    may_answer.set()
    batcher.close()


@contextlib.asynccontextmanager
async def served(*inferences: Inference, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server that runs during the block, or until SIGTERM."""
    port = free_port()
    models, given = Models.of(inferences), ServingOptions(port=port, **options)
    serving = _serve(models, Mock(address=""), given, EVERYBODY, MAX_REQUESTS)
    server = asyncio.create_task(serving)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), WAIT_S)
        yield channel
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(server, WAIT_S)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await asyncio.wait_for(call.code(), WAIT_S), await call.details()


def test_calls_without_a_message_end(inference: Inference) -> None:
    async def scenario() -> None:
        async with served(inference, timeout_s=0.1) as channel:
            endless = channel.stream_stream(f"{HEALTH}/Watch")()
            await endless.write(b"")
            assert await asyncio.wait_for(endless.read(), WAIT_S) != grpc.aio.EOF
            silent = channel.stream_unary(f"{HEALTH}/Check")()
            code, details = await status_of(silent)
            assert code == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "deadline passed before its answer" in details, "the server's words, not the client's"
            assert not endless.done(), "it ends when its client wants"

    asyncio.run(scenario())


def test_health_does_not_flap_at_the_start(inference: Inference, may_answer: threading.Event) -> None:
    slow = replace(inference, model=model_named("slow"))
    slow.model.not_ready = lambda: None if may_answer.wait(WAIT_S) else "late"  # type: ignore[method-assign]

    async def scenario() -> None:
        async with served(inference, slow) as channel:
            check = channel.unary_unary(f"{HEALTH}/Check")

            async def is_serving(name: str) -> bool:
                request = health_pb2.HealthCheckRequest(service=name).SerializeToString()
                reply = await asyncio.wait_for(check(request), WAIT_S)
                return bool(health_pb2.HealthCheckResponse.FromString(reply).status == SERVING)

            begin_s = time.monotonic()
            while time.monotonic() < begin_s + WAIT_S:
                await asyncio.sleep(0.01)
                with contextlib.suppress(grpc.aio.AioRpcError):  # NOT_FOUND: it was not asked yet
                    if await is_serving("m"):
                        break
            assert await is_serving("m")
            assert await is_serving(""), "the other was not asked yet"
            may_answer.set()

    asyncio.run(scenario())


def test_a_late_request_is_counted_as_such(inference: Inference) -> None:
    request = message("ModelInferRequest")(model_name="m")
    contents = request.inputs.add(name="batch", datatype="BYTES", shape=[1]).contents
    contents.bytes_contents.append(BATCH.to_bytes())

    async def scenario() -> None:
        async with served(inference, timeout_s=0.2) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for _ in range(5):  # the front's clock or Python's is first
                # Compressed requests are Python's.
                late = infer(request.SerializeToString(), compression=grpc.Compression.Gzip)
                assert (await status_of(late))[0] == grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(scenario())
    assert inference.statistics.status()["by_status"] == {"DEADLINE_EXCEEDED": 5}


def test_a_compressed_request_has_a_number_of_tensors_as_well(inference: Inference) -> None:
    request = message("ModelInferRequest")(model_name="m")
    for _ in range(4097):  # a million would inflate from a few kilobytes
        request.inputs.add()

    async def scenario() -> None:
        async with served(inference) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            call = infer(request.SerializeToString(), compression=grpc.Compression.Gzip)
            code, details = await status_of(call)
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert "4096" in details

    asyncio.run(scenario())


def test_plain_requests_for_each_of_several_models_need_no_python(
    inference: Inference, may_answer: threading.Event
) -> None:
    may_answer.set()
    others = [replace(inference, model=model_named(name)) for name in ("n", "o")]
    for one in (inference, *others):
        object.__setattr__(one, "infer", Mock(side_effect=UnavailableError("Python was asked")))

    async def scenario() -> None:
        async with served(inference, *others) as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for name in "mno":
                request = message("ModelInferRequest")(model_name=name)
                contents = request.inputs.add(name="batch", datatype="BYTES", shape=[1]).contents
                contents.bytes_contents.append(BATCH.to_bytes())
                await asyncio.wait_for(ask(request.SerializeToString()), WAIT_S)

    asyncio.run(scenario())


def test_plain_requests_beside_a_canary_and_a_log_need_no_python(
    inference: Inference, may_answer: threading.Event, tmp_path: Path
) -> None:
    may_answer.set()
    canary, shadow = Share(0.5, "canary"), Share(0.5, "shadow")
    canaries = Mock(share=canary, shadow_share=shadow)
    log = RequestLog(RequestLogOptions(path=tmp_path / "log", log_share=0.5))
    logged = Share(0.5, "log")
    batch = PersiaBatch(BATCH.id_type_features, labels=[Label(np.ones((BATCH.batch_size, 1), np.float32))])
    in_python, answered, expected = [], [], []

    async def infer(*arguments: Any) -> Prediction:
        in_python.append(arguments[3])
        raise UnavailableError("Python was asked")

    async def scenario() -> None:
        both = replace(inference, canary=canaries, request_log=log)
        object.__setattr__(both, "infer", infer)
        async with served(both) as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for number in range(64):
                version = ("", "stable")[number % 2]
                request = message("ModelInferRequest")(model_name="m", id=f"{number}", model_version=version)
                contents = request.inputs.add(name="batch", datatype="BYTES", shape=[1]).contents
                contents.bytes_contents.append(batch.to_bytes())
                is_canarys = canary.takes(request.id) and not version
                if is_canarys or shadow.takes(request.id):
                    expected.append(request.id)
                    with pytest.raises(grpc.aio.AioRpcError, match="Python was asked"):
                        await ask(request.SerializeToString())
                else:
                    await ask(request.SerializeToString())
                    answered.append(request.id)
            request.id, request.model_version = "", ""
            canary.draw.share = 1
            with pytest.raises(grpc.aio.AioRpcError, match="Python was asked"):
                await ask(request.SerializeToString())

    asyncio.run(scenario())
    assert in_python.pop(), "Python is to draw the same"
    assert in_python == expected
    assert 0 < len(expected) < 64
    log.close()
    num_logged = sum(logged.takes(request_id) for request_id in answered)
    assert split_batches((tmp_path / "log").read_bytes()) == [batch.to_bytes()] * num_logged
    assert 0 < num_logged < len(answered)


def test_what_no_reader_takes_is_not_logged(
    inference: Inference, may_answer: threading.Event, tmp_path: Path
) -> None:
    """The gRPC port answers without reading labels, and a reader of the log checks them."""
    may_answer.set()
    label = Label(np.ones((BATCH.batch_size, 1), np.float32), "clicks")
    labelled = PersiaBatch(BATCH.id_type_features, labels=[label]).to_bytes()
    bare = bytearray(PersiaBatch(BATCH.id_type_features, requires_grad=False).to_bytes())
    bare[8] = 1  # requires_grad, which needs labels
    contents = [bytes(bare), labelled.replace(b"clicks", b"click\xff"), labelled]
    log = RequestLog(RequestLogOptions(path=tmp_path / "log"))

    async def scenario() -> None:
        async with served(replace(inference, request_log=log)) as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for content in contents:
                request = message("ModelInferRequest")(model_name="m")
                asked = request.inputs.add(name="batch", datatype="BYTES", shape=[1]).contents
                asked.bytes_contents.append(content)
                await ask(request.SerializeToString())

    asyncio.run(scenario())
    log.close()
    assert split_batches((tmp_path / "log").read_bytes()) == [labelled]
    assert (log.status()["num_written"], log.status()["num_dropped"]) == (1, 2)


def test_watchers_see_that_the_server_stops(inference: Inference) -> None:
    async def scenario() -> list[int]:
        seen = []
        async with served(inference) as channel:
            watches = [channel.unary_stream(f"{HEALTH}/Watch")(b"") for _ in range(20)]
            for watch in watches:
                await asyncio.wait_for(watch.read(), WAIT_S)
            os.kill(os.getpid(), signal.SIGTERM)
            for watch in watches:
                answer = await asyncio.wait_for(watch.read(), WAIT_S)
                seen.append(health_pb2.HealthCheckResponse.FromString(answer).status)
                assert await watch.code() == grpc.StatusCode.UNAVAILABLE
        return seen

    assert asyncio.run(scenario()) == [health_pb2.HealthCheckResponse.NOT_SERVING] * 20


def test_a_failure_does_not_end_the_reports(inference: Inference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEALTH_INTERVAL_S", 0.01)
    told: list[Any] = []  # the versions whose features the front was told
    monkeypatch.setattr(server, "_use_inputs", lambda _front, known: told.append(known.model.current))
    num_asked = 0

    def not_ready() -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise RuntimeError("a fault")

    first = inference.model.current
    monkeypatch.setattr(inference.model, "not_ready", not_ready)

    async def reached(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        request = health_pb2.HealthCheckRequest(service="m").SerializeToString()
        async with served(inference) as channel:
            watch = channel.unary_stream(f"{HEALTH}/Watch")(request)
            status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            while status != health_pb2.HealthCheckResponse.SERVING:
                answer = await asyncio.wait_for(watch.read(), WAIT_S)
                status = health_pb2.HealthCheckResponse.FromString(answer).status
            await reached(lambda: num_asked >= 5)
            assert told == [first] * 2, "when the port is made, and by the first report"
            monkeypatch.setattr(inference.model, "current", "the next version")
            await reached(lambda: len(told) == 3)
            assert told[2] == "the next version"

    asyncio.run(scenario())


def test_the_port_is_closed_if_the_other_cannot_be_opened(inference: Inference) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServingOptions(port=port, http_port=taken.getsockname()[1])
        with pytest.raises(StorageError, match="--http-port") as failure:
            asyncio.run(_serve(Models.of([inference]), Mock(), options, EVERYBODY, MAX_REQUESTS))
        # What the error's traceback holds is alive still.
        assert failure.tb is not None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), WAIT_S)


def message_of(content: bytes, encoding: str, max_bytes: int = 100) -> bytes:
    """What the call reads of a compressed message."""
    call = Call(Mock(), 1, Limits(max_bytes, WAIT_S), ("/s/m", None, encoding, "peer", 0, None, ""))
    call.arrive((content, True))
    return asyncio.run(call.message())


def test_compressed_messages_have_a_size() -> None:
    for compress, encoding in ((gzip.compress, "gzip"), (zlib.compress, "deflate")):
        whole = compress(b"a" * 100)
        assert message_of(whole, encoding) == b"a" * 100
        with pytest.raises(ResourceExhaustedError, match="more than 99 bytes"):
            message_of(whole, encoding, max_bytes=99)
        for damaged in (whole[:-1], whole + whole):
            with pytest.raises(InvalidArgumentError, match="not one whole"):
                message_of(damaged, encoding)
        with pytest.raises(InvalidArgumentError, match=f"is no {encoding}"):
            message_of(b"x" + whole, encoding)


def test_an_unknown_compression_is_not_implemented() -> None:
    front = Mock()
    call = Call(front, 1, Limits(100, WAIT_S), ("/s/m", None, "snappy", "peer", 0, None, ""))
    call.arrive((b"abc", True))
    with pytest.raises(InvalidArgumentError, match="by 'snappy': send gzip"):
        asyncio.run(call.message())
    call.finish("INVALID_ARGUMENT", "what the error says")  # as for every error of a handler
    ((number, code, text),) = [done.args for done in front.finish.mock_calls]
    assert (number, code) == (1, CODES["UNIMPLEMENTED"])
    assert "'snappy'" in text
