"""The most requests that a server answers in a second, and how many it answers in time beyond that.

`benchmarks.serving` prints both beside their floors. Server and client share the machine, so that the rate is
given by processor time, too: what the server could answer with a core to itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.grpc_load import closed_loop, open_loop
from persia.embedding.data import IDTypeFeature, NonIDTypeFeature, PersiaBatch
from persia.serving.protocol import message, tensors_of
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


def throughput(address: str, pid: int, messages: Sequence[bytes], seconds: float) -> tuple[float, float]:
    """Requests/s with `IN_FLIGHT` at a time, by the clock and by the processor time of the server."""
    began_cpu_s = _cpu_s(pid)
    count = len(closed_loop(address, messages, IN_FLIGHT, seconds, TIMEOUT_S).times_s)
    return count / seconds, count / max(0.01, _cpu_s(pid) - began_cpu_s)


def overloaded(address: str, messages: Sequence[bytes], rate: float, seconds: float) -> tuple[float, float]:
    """Answers/s within `DEADLINE_S` of when each of `rate` requests a second was due, and the median time of
    a refusal [s]."""
    outcome = open_loop(address, messages, rate, seconds, DEADLINE_S)
    in_time = sum(time_s <= DEADLINE_S for time_s in outcome.times_s)
    return in_time / seconds, median(outcome.failed_s) if outcome.failed_s else 0.0


def _cpu_s(pid: int) -> float:
    # The name of the process may have spaces; fields are counted behind it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
