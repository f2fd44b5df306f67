"""Traces of all processes of a job, joined into one file of Chrome's trace event format.

Processes of one host share the monotonic clock, so their spans are placed exactly. Those of other hosts are
placed by their wall clocks: as exact as the hosts' clocks agree, which NTP keeps within about a millisecond.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from persia.errors import PermissionDeniedError, StorageError, UnavailableError
from persia.messaging.discovery import ServiceInfo
from persia.messaging.subjects import NN_WORKER
from persia.observability.status import fetch_json
from persia.waiting import Attempts

_SPANS_PER_BATCH = 60  # of one process, amply
_MIN_SPANS = 20_000
_MAX_SPANS = 1_000_000


@dataclass(kw_only=True)
class Recording:
    """Chrome trace `events`, and what could not be recorded."""

    events: list[dict[str, Any]]
    num_spans: int
    num_batches: int
    elapsed_s: float
    problems: list[str] = field(default_factory=list)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Raises StorageError."""
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"traceEvents": self.events, "displayTimeUnit": "ms"}, file)
        except OSError as error:
            raise StorageError(f"cannot write the trace to {os.fspath(path)}: {error.strerror}") from error


def record(processes: Sequence[ServiceInfo], *, num_batches: int, limit_s: float) -> Recording:
    """Records until the NN workers have trained `num_batches` more, or `limit_s` has passed."""
    spans = min(max(_MIN_SPANS, num_batches * _SPANS_PER_BATCH), _MAX_SPANS)
    problems: list[str] = []
    ranks = [info for info in processes if info.role == NN_WORKER]
    with ThreadPoolExecutor(min(len(processes), 32)) as pool:
        started = time.monotonic()
        # Counted before the recordings start, so that none of the batches counted lacks its spans.
        first = _num_trained(ranks, problems)
        list(pool.map(lambda info: _ask(info, f"/trace/start?spans={spans}", problems), processes))
        trained = first
        for _ in Attempts(limit_s, pause_s=0.1):
            # A rank that does not answer is missing from the sum, which must not fall for it.
            trained = max(trained, _num_trained(ranks, problems))
            # A process that has ended ends the recording: what follows would lack its spans.
            if problems or trained - first >= num_batches:
                break
        elapsed_s = time.monotonic() - started
        answers = list(pool.map(lambda info: _ask(info, "/trace/stop", problems), processes))
    recorded = [(info, answer) for info, answer in zip(processes, answers, strict=True) if answer]
    for info, answer in recorded:
        if answer["num_dropped"]:
            problems.append(f"{info}: {answer['num_dropped']} spans did not fit; record fewer batches")
    return Recording(
        events=trace_events(recorded),
        num_spans=sum(len(answer["spans"]) for _, answer in recorded),
        num_batches=trained - first,
        elapsed_s=elapsed_s,
        problems=problems,
    )


def _num_trained(ranks: Sequence[ServiceInfo], problems: list[str]) -> int:
    total = 0
    for info in ranks:
        try:
            total += fetch_json(info.status_address, "/status")["stats"]["batches_trained"]
        except (UnavailableError, PermissionDeniedError) as error:
            problems.append(f"{info} has ended, or is not reachable: {error}")
    return total


def _ask(info: ServiceInfo, path: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        return fetch_json(info.status_address, path, method="POST")
    except (UnavailableError, PermissionDeniedError) as error:
        problems.append(f"{info} is not part of the trace: {error}")
        return None


def trace_events(recorded: Sequence[tuple[ServiceInfo, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Times are microseconds since the first span. Calls overlap on their thread, so they are asynchronous
    events."""
    if not recorded:
        return []
    offsets = [_offset_ns(answer, recorded[0][1]) for _, answer in recorded]
    placed = [
        (info, answer["spans"], offset) for (info, answer), offset in zip(recorded, offsets, strict=True)
    ]
    zero = min((span[1] + offset for _, spans, offset in placed for span in spans), default=0)
    events: list[dict[str, Any]] = []
    for place, (info, spans, offset) in enumerate(placed):
        process = {"pid": place, "tid": 0}
        name = {"name": f"{info.role} {info.index}"}
        events.append({**process, "ph": "M", "name": "process_name", "args": name})
        events.append({**process, "ph": "M", "name": "process_sort_index", "args": {"sort_index": place}})
        for number, span in enumerate(spans):
            events += _span_events(place, number, span, offset - zero)
    return events


def _offset_ns(answer: dict[str, Any], reference: dict[str, Any]) -> int:
    """What to add to a time of `answer` to get one of `reference`'s clock."""
    if answer["boot_id"] and answer["boot_id"] == reference["boot_id"]:
        return 0
    # Monotonic clocks of different hosts have nothing in common but their distance to the wall clock.
    own = answer["unix_ns"] - answer["monotonic_ns"]
    others = reference["unix_ns"] - reference["monotonic_ns"]
    return int(own - others)


def _span_events(place: int, number: int, span: Sequence[Any], shift_ns: int) -> list[dict[str, Any]]:
    name, begin_ns, end_ns, reference, batch_id, thread = span
    arguments = {"reference": reference} if reference else {}
    if batch_id is not None:
        arguments["batch_id"] = batch_id
    common = {"name": name, "cat": "persia", "pid": place, "tid": thread, "args": arguments}
    begin_us, end_us = (begin_ns + shift_ns) / 1000, (end_ns + shift_ns) / 1000
    if name.startswith(("rpc to ", "queue of ")):  # which overlap
        common["id"] = f"{place}.{number}"
        return [{**common, "ph": "b", "ts": begin_us}, {**common, "ph": "e", "ts": end_us}]
    return [{**common, "ph": "X", "ts": begin_us, "dur": end_us - begin_us}]
