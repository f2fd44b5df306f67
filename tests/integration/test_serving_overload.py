"""Clients of an overloaded server are refused or answered, and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest

from persia.serving.protocol import message

from .test_serving import START_S, make_batch, one_model

INFER = "/inference.GRPCInferenceService/ModelInfer"


async def ask_by_aio(address: str, content: bytes, num: int) -> list[tuple[grpc.StatusCode, bytes]]:
    async with grpc.aio.insecure_channel(address) as channel:
        infer = channel.unary_unary(INFER)

        async def ask() -> tuple[grpc.StatusCode, bytes]:
            try:
                return grpc.StatusCode.OK, await infer(content, timeout=START_S)
            except grpc.aio.AioRpcError as failure:
                return failure.code(), b""

        return await asyncio.gather(*(ask() for _ in range(num)))


def ask_by_threads(address: str, content: bytes, num: int) -> list[tuple[grpc.StatusCode, bytes]]:
    with grpc.insecure_channel(address) as channel:
        calls = [channel.unary_unary(INFER).future(content, timeout=START_S) for _ in range(num)]
        codes = [call.code() for call in calls]
        return [
            (code, call.result() if code == grpc.StatusCode.OK else b"")
            for code, call in zip(codes, calls, strict=True)
        ]


@pytest.mark.parametrize("is_aio", [False, True])
def test_libraries_of_grpc_under_overload(tmp_path: Path, is_aio: bool) -> None:
    """Their messages are far longer than what an overloaded server lets them send before it admits a call."""
    asked = message("ModelInferRequest")(model_name="m")
    contents = asked.inputs.add(name="batch", datatype="BYTES", shape=[1]).contents
    contents.bytes_contents.append(make_batch([10, 20] * 2000, dense=0.5))
    content = asked.SerializeToString()
    codes = grpc.StatusCode
    with one_model(tmp_path, "--max-queued", "1", "--max-batch-size", "4000") as served:
        with grpc.insecure_channel(served.address) as channel:
            expected = channel.unary_unary(INFER)(content, timeout=START_S)
        seen: Counter[grpc.StatusCode] = Counter()
        for _ in range(1000):
            if seen[codes.OK] >= 50 and seen[codes.RESOURCE_EXHAUSTED] >= 1000:
                break
            if is_aio:
                answers = asyncio.run(ask_by_aio(served.address, content, 200))
            else:
                answers = ask_by_threads(served.address, content, 200)
            seen.update(code for code, _ in answers)
            assert {reply for code, reply in answers if code == codes.OK} <= {expected}
        assert set(seen) == {codes.OK, codes.RESOURCE_EXHAUSTED}
        assert seen[codes.OK] >= 50
