"""The benchmark of devices runs, on the CPU, and reads a trace correctly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.operations import operations, row_numbers
from benchmarks.gpu.trace import profile_of


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_each_system_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = ["persia", "persia, a copy a slot", "persia, servers", "torch, dense"]
    options = ["--quick", "--device", "cpu", "--threads", "1", "--seconds", "0.01"]
    main([*options, "--output", str(tmp_path), "--systems", *systems])
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [found["system"] for found in results] == systems * 2
    assert all(found["ms"] > 0 for found in results)
    shown = capsys.readouterr().out
    assert "| 2 slots x 3 IDs, batch 32, dim 8 | torch, dense |" in shown


def event(category: str, name: str, begin: float, end: float, **arguments: Any) -> dict[str, Any]:
    span = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}
    return {**span, "pid": 1, "tid": 2, "args": arguments}


def test_a_trace_tells_what_is_hidden_and_who_waits() -> None:
    elsewhere = event("cuda_runtime", "cudaEventSynchronize", 0, 50) | {"tid": 3}
    events = [
        event("kernel", "first", 0, 10),
        event("kernel", "beside the first", 5, 12),
        event("kernel", "second", 20, 30),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 8, 16, bytes=600),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 21, 25, bytes=200),
        event("cuda_runtime", "cudaStreamSynchronize", 40, 44),
        elsewhere,
        {"ph": "M", "name": "process_name", "pid": 1},
    ]
    profile = profile_of(events, 2, process=1, thread=2)
    assert (profile.copies_in, profile.bytes_in, profile.copy_in_us) == (0.5, 300, 4)
    assert (profile.overlapped_in, profile.overlapped_out) == (0.5, 1.0)
    assert (profile.kernels, profile.kernel_us) == (1.5, 11)
    assert profile.blocked_us == 2


def test_a_trace_without_copies_has_none() -> None:
    assert profile_of([], 1, process=1, thread=2).overlapped_in == 0.0


def test_each_way_to_sum_gradients_runs() -> None:
    for operation in operations(row_numbers(8), width=4).values():
        operation()
