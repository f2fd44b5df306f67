"""What benchmarks.tiers makes of the turns of real jobs, small ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.tiers.job import JobOptions
from benchmarks.tiers.page_cache import CgroupError, MemoryGroup, memory_group
from benchmarks.tiers.report import announced_line, checkpoint_lines, draw_curve, memory_table
from benchmarks.tiers.turns import Comparison, Schedule, compare, opened


def test_checkpoints_are_judged_by_what_one_costs_in_a_minute() -> None:
    counts = {"turn_seconds": 10.0, "asking_seconds": 0.1, "num_committed": 2.0}
    dear = Comparison("", 0.1, ours=[1.07, 1.07], theirs=[1.0, 1.0], counts=counts)
    assert "700 ms each" in checkpoint_lines(dear)[0]
    assert checkpoint_lines(dear)[1].endswith("+1.17%; floor 1%: miss")
    cheap = Comparison("", 0.1, ours=[1.05, 1.05], theirs=[1.0, 1.0], counts=counts)
    assert checkpoint_lines(cheap)[1].endswith("+0.83%; floor 1%: pass")


def test_jobs_take_turns_and_count_what_was_not_cached(tmp_path: Path) -> None:
    job = JobOptions(rows=4000, slots=2, dim=4, batch_size=64, exponent=1.1)
    pool = JobOptions(rows=4000, slots=2, dim=4, batch_size=64, exponent=1.1, kind="file", cache=0.2)
    schedule = Schedule(rounds=2, seconds=0.01, settle=5)
    with opened([job, pool], schedule, tmp_path) as sides:
        [found] = compare(sides, schedule, ["sparse part alone"])
        memories = [side.memory() for side in sides]
    assert not list(tmp_path.iterdir())
    assert len(found.ours) == len(found.theirs) == schedule.rounds
    assert 0 < found.miss_share_of_ids < found.miss_share < 1
    assert found.counts["num_ids"] >= 2 * 10 * 2 * 64
    assert [memory["num_rows"] for memory in memories] == [job.rows, job.rows]
    assert [memory["num_cached"] <= 800 * 17 // 16 for memory in memories] == [True, True]
    assert [memory["limit_bytes"] for memory in memories] == [0, 0]


def test_a_job_whose_cache_counts_bytes_has_a_limit(tmp_path: Path) -> None:
    job = JobOptions(
        rows=4000, slots=2, dim=16, batch_size=64, exponent=1.1, kind="file", cache=0.5, counts_bytes=True
    )
    with opened([job], Schedule(rounds=1, seconds=0.01, settle=5), tmp_path) as [side]:
        memory = side.memory()
    assert memory["limit_bytes"] == 2000 * 144
    assert 0 < memory["num_cached"] < 2000
    picture = tmp_path / "curve.png"
    found = Comparison("training", 0.5, ours=[2.0], theirs=[1.0], counts={"num_missed": 1, "num_lookups": 9})
    draw_curve(picture, "", [found], [{"cache": 0.5, **memory}], job.batch_size)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert memory_table([{"kind": "file", "cache": 0.5, **memory}]).row_count == 1


def test_jobs_that_announce_take_turns_with_those_that_do_not(tmp_path: Path) -> None:
    job = JobOptions(rows=4000, slots=2, dim=4, batch_size=64, exponent=1.1, kind="file", cache=0.3)
    schedule = Schedule(rounds=2, seconds=0.01, settle=5)
    jobs = [job, dataclasses.replace(job, announces=True, stream_staleness=1)]
    with opened(jobs, schedule, tmp_path) as sides:
        [found] = compare(sides, schedule, ["training, staleness 1"])
    assert 0 < found.counts["num_prefetched"] <= found.counts["num_missed"]
    assert "times as long" in announced_line(found)


@pytest.mark.parametrize(
    ("limit", "used", "pages"),
    [
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
        ("memory.max", "memory.current", "file"),
    ],
    ids=["v1", "v2"],
)
def test_a_process_keeps_its_own_memory_and_a_share_of_the_page_cache(
    tmp_path: Path, limit: str, used: str, pages: str
) -> None:
    (tmp_path / limit).write_text("unlimited")
    (tmp_path / used).write_text("1000\n")
    (tmp_path / "memory.stat").write_text(f"{pages} 300\nother 5\n")
    MemoryGroup(tmp_path).leave(50)
    assert (tmp_path / limit).read_text() == "750"


def test_without_cgroups_the_page_cache_cannot_be_limited(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("")  # no directory: nothing can be made in it
    with pytest.raises(CgroupError, match="run as root"), memory_group(1, tmp_path / "memory"):
        pass
