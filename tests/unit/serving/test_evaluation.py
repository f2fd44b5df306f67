"""The client of predictions against scripted servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from persia.errors import InvalidArgumentError
from persia.serving.evaluation import PredictionClient, latency
from persia.serving.protocol import SERVICE, message


@contextmanager
def answered_by(infer: Callable[[bytes, Any], bytes]) -> Iterator[PredictionClient]:
    """A client whose requests `infer` answers."""
    methods = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with PredictionClient(f"127.0.0.1:{port}", timeout_s=240, wait_s=240) as client:
            yield client
    finally:
        server.stop(None).wait(60)


@pytest.mark.parametrize(("num_outputs", "num_contents"), [(0, 0), (1, 0), (0, 1)])
def test_a_reply_without_a_tensor_is_named(num_outputs: int, num_contents: int) -> None:
    reply = message("ModelInferResponse")()
    for _ in range(num_outputs):
        reply.outputs.add(name="output_0", datatype="FP32", shape=[1])
    reply.raw_output_contents.extend([bytes(4)] * num_contents)
    with (
        answered_by(lambda *_: bytes(reply.SerializeToString())) as client,
        pytest.raises(InvalidArgumentError, match=f"has {num_outputs} outputs and {num_contents} raw"),
    ):
        client.predict(b"batch")


def test_requests_are_under_way_together() -> None:
    together = threading.Barrier(3)
    asked = []

    def infer(request: bytes, _: Any) -> bytes:
        together.wait(120)  # BrokenBarrierError: fewer requests were under way
        asked.append(request)
        return b""

    with answered_by(infer) as client:
        batches = [str(number).encode() for number in range(9)]
        found = latency(client, batches, 4, concurrency=3)
        expected = sorted(map(client.request, [batches[0]] * 3 + batches))
    assert found.num_requests == 9
    assert sorted(asked) == expected
