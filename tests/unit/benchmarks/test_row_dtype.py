"""What rows of 16 bits lose is measured, and updates by chance lose far less than those to nearest."""

from __future__ import annotations

import sys

import pytest

from benchmarks import row_dtype


def test_it_shows_what_is_lost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"updates": 20, "steps": 2, "judged": 2, "seeds": 1}
    monkeypatch.setattr(sys, "argv", ["row_dtype", *(f"--{name}={n}" for name, n in arguments.items())])
    row_dtype.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    words = [line.split() for line in lines[:5]]
    lost = {" ".join(name): abs(float(together.rstrip("%"))) for *name, together, _ in words}
    for name in ("float16", "bfloat16"):
        assert lost[name] < 2
        assert lost[f"{name}, to nearest"] > 50
    assert [line.split()[0] for line in lines[5:]] == ["float32", "float16", "bfloat16"]
    assert all(0.4 < float(line.split()[2]) < 0.6 for line in lines[5:])  # next to nothing is learnt yet
