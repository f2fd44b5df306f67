"""What a trace of torch.profiler says of steps: copies, how much of them compute hides, waits of the loop."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["Profile", "profile_of", "profiled"]

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Profile:
    """Means of a step. Times in microseconds."""

    copies_in: float
    bytes_in: float
    copy_in_us: float
    copies_out: float
    bytes_out: float
    overlapped_in: float  # of the time of copies to the device, the share in which a kernel runs
    overlapped_out: float
    kernels: float
    kernel_us: float  # in which at least one runs
    blocked_us: float  # the thread of the loop in calls that wait for the device


def profiled(loop: Iterator[object], num_steps: int) -> Profile:
    """Of the loop's next steps, whose copies, kernels and waits are recorded."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            next(loop)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return profile_of(events, num_steps, os.getpid(), threading.get_native_id())


def profile_of(events: list[dict[str, Any]], num_steps: int, process: int, thread: int) -> Profile:
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = _merged([_span(e) for e in spans if e.get("cat") == "kernel"])
    ways = {
        way: [e for e in spans if e.get("cat") == "gpu_memcpy" and way in e["name"]]
        for way in ("HtoD", "DtoH")
    }
    waits = [
        e
        for e in spans
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and "Synchronize" in e["name"]
        and (e["pid"], e["tid"]) == (process, thread)
    ]

    def size(way: str) -> float:
        return float(sum(e.get("args", {}).get("bytes", 0) for e in ways[way])) / num_steps

    def share(way: str) -> float:
        copies = [_span(e) for e in ways[way]]
        total = sum(end - begin for begin, end in copies)
        return sum(_common(span, kernels) for span in copies) / total if total else 0.0

    return Profile(
        copies_in=len(ways["HtoD"]) / num_steps,
        bytes_in=size("HtoD"),
        copy_in_us=sum(e["dur"] for e in ways["HtoD"]) / num_steps,
        copies_out=len(ways["DtoH"]) / num_steps,
        bytes_out=size("DtoH"),
        overlapped_in=share("HtoD"),
        overlapped_out=share("DtoH"),
        kernels=sum(e.get("cat") == "kernel" for e in spans) / num_steps,
        kernel_us=sum(end - begin for begin, end in kernels) / num_steps,
        # The last one is that of `profiled`.
        blocked_us=sum(e["dur"] for e in waits if e["name"] != "cudaDeviceSynchronize") / num_steps,
    )


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _common(span: Span, merged: list[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in merged)
