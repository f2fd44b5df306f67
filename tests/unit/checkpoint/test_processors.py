"""`max_processors`: by affinity and by the limit of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia.checkpoint.processors import max_processors


@pytest.mark.parametrize(
    ("percent", "limit", "expected"),
    [
        (5, None, 0.4),
        (5, "max 100000\n", 0.4),
        (5, "400000 100000\n", 0.2),
        (5, "9900000 100000\n", 0.4),
        (5, "what is this", 0.4),
        (50, None, 4.0),
        (1, "100000 100000\n", 0.05),  # the least
        (100, "400000 100000\n", 0.0),  # any number
    ],
)
def test_a_dump_takes_its_percentage_of_the_processors_there_are(
    percent: int, limit: str | None, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr("persia.checkpoint.processors._LIMIT_OF_CONTAINER", file)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert max_processors(percent) == pytest.approx(expected)
