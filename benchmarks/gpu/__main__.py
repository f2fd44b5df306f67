"""`python -m benchmarks.gpu`: the training step on a CUDA device, as one table.

Each case trains DLRM with Adagrad over IDs of a Zipf law with exponent 1.1. A figure is the median over
chunks of steps, each measured from one synchronisation to the next. The systems of a case run one after
the other in this process. torch and fbgemm keep their tables in the device's memory, persia in the
host's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import number, whole
from benchmarks.gpu.systems import SYSTEMS, UnavailableError
from benchmarks.gpu.trace import Profile, profiled
from benchmarks.gpu.traffic import CASES, QUICK_CASES, Case, Traffic
from benchmarks.machine import describe_machine
from persia.observability.phases import STEP_PHASES

WARM_STEPS, CHUNK, PROFILED_STEPS = 48, 10, 8
LEAST_CHUNKS = 3
PROFILED = ("persia", "persia, a copy a slot", "persia, servers")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(loop: Iterator[object], device: torch.device, seconds: float, chunk: int) -> list[float]:
    """Milliseconds of a step, by chunk."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < LEAST_CHUNKS or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(chunk):
            next(loop)
        synchronize(device)
        found.append((time.perf_counter() - begin) / chunk * 1e3)
    return found


def phases() -> dict[str, tuple[float, float]]:
    """(count, seconds) of each phase of the loop so far."""
    found = {}
    for phase in STEP_PHASES:
        buckets, total, _ = phase.stats.snapshot()
        found[phase.stats.name] = (float(sum(buckets)), float(total))
    return found


def measure(
    system: str, traffic: Traffic, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    chunk, warm = (2, 3) if options.quick else (CHUNK, WARM_STEPS)
    with SYSTEMS[system](traffic, device) as loop:
        for _ in range(warm):
            next(loop)
        synchronize(device)
        before = phases()
        times = timed(loop, device, options.seconds, chunk)
        after = phases()
        profile: Profile | None = None
        if device.type == "cuda" and system in PROFILED:
            profile = profiled(loop, PROFILED_STEPS)
    steps = len(times) * chunk
    return {
        "case": dataclasses.asdict(traffic.case),
        "name": traffic.case.name,
        "system": system,
        "ms": statistics.median(times),
        "chunks_ms": times,
        "phases_ms": {
            name: (total - before[name][1]) / steps * 1e3
            for name, (count, total) in after.items()
            if count > before[name][0]
        },
        "profile": None if profile is None else dataclasses.asdict(profile),
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| case | system | ms a step | samples/s |", "|---|---|---|---|"]
    for found in results:
        rate = found["case"]["batch_size"] / found["ms"] * 1e3
        lines.append(f"| {found['name']} | {found['system']} | {found['ms']:.2f} | {rate:,.0f} |")
    profiles = [found for found in results if found["profile"] is not None]
    if profiles:
        lines += [
            "",
            "| case | system | copies in | MB in | under kernels | copies out | MB out | under kernels "
            "| kernels | kernels run, ms | loop waits, ms |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
    for found in profiles:
        p = found["profile"]
        lines.append(
            f"| {found['name']} | {found['system']} | {p['copies_in']:.1f} | {p['bytes_in'] / 1e6:.2f} "
            f"| {p['overlapped_in']:.0%} | {p['copies_out']:.1f} | {p['bytes_out'] / 1e6:.2f} "
            f"| {p['overlapped_out']:.0%} | {p['kernels']:.0f} | {p['kernel_us'] / 1e3:.2f} "
            f"| {p['blocked_us'] / 1e3:.2f} |"
        )
    return "\n".join(lines)


def cases_of(options: argparse.Namespace) -> list[Case]:
    cases = QUICK_CASES if options.quick else CASES
    return [case for case in cases if options.only in case.name]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the program")
    parser.add_argument("--quick", action="store_true", help="tiny cases, whose figures mean nothing")
    parser.add_argument("--seconds", type=number(0.0), default=1.0, help="of each system and case")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--threads", type=whole(1), help="of torch, on the host")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="folder for results.json")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    results, skipped = [], {}
    for case in cases_of(options):
        traffic = Traffic(case)
        for system in options.systems:
            try:
                found = measure(system, traffic, device, options)
            except UnavailableError as reason:
                skipped[system] = str(reason)
                continue
            results.append(found)
            details = "  ".join(f"{name} {ms:.2f}" for name, ms in found["phases_ms"].items())
            print(f"{case.name}: {system}: {found['ms']:.2f} ms  {details}", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    about = {
        "machine": describe_machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "skipped": skipped,
        "results": results,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(about, indent=1))
    print(f"\n{about['device']}, torch {torch.__version__}\n\n{table(results)}")
    for system, why in skipped.items():
        print(f"{system}: {why}")


if __name__ == "__main__":
    main()
