"""The most requests that a server answers in a second, and how many it answers in time beyond that.

`benchmarks.serving` prints both beside their floors. Server and client share the machine, so that the rate is
given by processor time, too: what the server could answer with a core to itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from persia.embedding.data import IDTypeFeature, NonIDTypeFeature, PersiaBatch
from persia.serving.protocol import SERVICE, message, tensors_of
from persia.serving.tensors import batch_of

__all__ = ["DEADLINE_S", "overloaded", "single", "throughput"]

IN_FLIGHT = 64
TIMEOUT_S = 60.0
DEADLINE_S = 0.2
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def single(request: bytes) -> bytes:
    """The request of the first sample alone."""
    asked = message("ModelInferRequest").FromString(request)
    batch = batch_of(tensors_of(asked), None)
    first = PersiaBatch(
        [
            IDTypeFeature.from_csr(f.name, f.ids[: f.offsets[1]].copy(), f.offsets[:2].copy())
            for f in batch.id_type_features
        ],
        [NonIDTypeFeature(f.data[:1], f.name) for f in batch.non_id_type_features],
        requires_grad=False,
    )
    asked.inputs[0].contents.bytes_contents[0] = first.to_bytes()
    encoded: bytes = asked.SerializeToString()
    return encoded


async def throughput(
    address: str, pid: int, messages: Sequence[bytes], seconds: float
) -> tuple[float, float]:
    """Requests/s with `IN_FLIGHT` at a time, by the clock and by the processor time of the server."""
    count, began_s, began_cpu_s = 0, time.perf_counter(), _cpu_s(pid)
    async with grpc.aio.insecure_channel(address) as channel:
        infer: Any = channel.unary_unary(f"/{SERVICE}/ModelInfer")

        async def ask() -> None:
            nonlocal count
            while time.perf_counter() - began_s < seconds:
                count += 1
                await infer(messages[count % len(messages)], timeout=TIMEOUT_S)

        await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return count / (time.perf_counter() - began_s), count / max(0.01, _cpu_s(pid) - began_cpu_s)


async def overloaded(address: str, messages: Sequence[bytes], rate: float, seconds: float) -> float:
    """Answers/s within `DEADLINE_S` of when each of `rate` requests a second was due."""
    num_answered = 0
    async with grpc.aio.insecure_channel(address) as channel:
        infer: Any = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        began_s = time.perf_counter() + 0.1

        async def ask(number: int) -> None:
            nonlocal num_answered
            due_s = began_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            # What a client that falls behind sends late has less time left, as its user waits already.
            if (left_s := due_s + DEADLINE_S - time.perf_counter()) <= 0:
                return
            try:
                await infer(messages[number % len(messages)], timeout=left_s)
                num_answered += 1
            except grpc.aio.AioRpcError:
                pass

        await asyncio.gather(*(ask(number) for number in range(int(rate * seconds))))
    return num_answered / seconds


def _cpu_s(pid: int) -> float:
    # The name of the process may have spaces; fields are counted behind it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
