"""How many processors a dump takes: by affinity, by the limit of a container, and as it is asked for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from persia.checkpoint.checkpoints import Checkpoints, DumpRequest
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.protocol import Request, Verb
from persia.checkpoint.server_job import DumpJob, ServerShare, dump_percent, max_processors
from persia.checkpoint.service import CheckpointService
from persia.config import CheckpointingConfig, parse_global_config
from persia.embedding.optim import Adagrad
from persia.errors import InvalidArgumentError
from persia.nn import EmbeddingBagCollection
from persia.storage.manifest import FileEntry, make_dump_id
from persia.storage.schema import RowSchema
from persia.storage.shard_file import write_shard_file

from .conftest import SLOTS, make_bags, train


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
    monkeypatch.setattr("persia.checkpoint.server_job._CGROUPS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert max_processors(percent) == pytest.approx(expected)


@pytest.mark.parametrize(("quota", "expected"), [(200_000, 1.0), (-1, 4.0)])
def test_the_limit_of_a_container_of_version_1(
    quota: int, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr("persia.checkpoint.server_job._CGROUPS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert max_processors(50) == pytest.approx(expected)


@pytest.mark.parametrize(("has_packets", "expected"), [(False, 7), (True, 100)])
def test_dumps_do_not_hold_packets_back_for_longer_than_they_must(has_packets: bool, expected: int) -> None:
    config = parse_global_config(
        {
            "common_config": {"checkpointing_config": {"dump_percent": 7}},
            "embedding_parameter_server_config": {"enable_incremental_update": has_packets},
        }
    )
    assert dump_percent(config) == expected


def test_a_dump_that_rests_is_cancelled_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.checkpoint.server_job.max_processors", lambda percent: 1e-8)  # takes days
    bags = make_bags()
    train(bags)
    share = ServerShare(store=bags.store, index=0, replicas=1, schema=None, num_threads=1)
    request = Request(verb=Verb.DUMP, operation=make_dump_id(), arguments={"directory": str(tmp_path)})
    job = DumpJob(request, share, 60.0)
    has_ended = threading.Event()

    def train_on() -> None:
        while not has_ended.is_set():
            train(bags, num_ids=50, steps=1)

    train(bags, num_ids=50, steps=1)  # since the cut
    trainer = threading.Thread(target=train_on)
    trainer.start()
    try:
        job.start()
        time.sleep(0.3)
        assert not job.is_over, "it rests"
        job.cancel()
        assert job.is_over
        assert str(job.report().error) == "it was cancelled"
    finally:
        has_ended.set()
        trainer.join()


def test_a_collections_dump_takes_what_its_caller_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def recorded(percent: int) -> float:
        given.append(percent)
        return max_processors(percent)

    monkeypatch.setattr("persia.checkpoint.server_job.max_processors", recorded)
    bags = EmbeddingBagCollection({"item": 4}, Adagrad(lr=0.1))
    bags(torch.arange(10), torch.ones(1, 10, dtype=torch.int64)).sum().backward()
    bags.dump(tmp_path / "default")
    bags.dump(tmp_path / "given", dump_percent=70)
    assert given == [CheckpointingConfig().dump_percent, 70]
    for wrong in (0, 101):
        with pytest.raises(InvalidArgumentError, match=f"dump_percent={wrong} must be"):
            bags.dump(tmp_path / "wrong", dump_percent=wrong)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(("percent", "expected"), [(50, 4.0), (100, 0.0)])
def test_a_dump_is_told_how_many_processors_it_may_take(
    percent: int, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    class Rows:
        def begin_snapshot(self, num_parts: int, *, with_state: bool, max_processors: float) -> Any:
            given.append(max_processors)
            return bags.store.begin_snapshot(num_parts, with_state=with_state, max_processors=max_processors)

        def __getattr__(self, name: str) -> Any:
            return getattr(bags.store, name)

    monkeypatch.setattr("persia.checkpoint.server_job.max_processors", {50: 4.0, 100: 0.0}.get)
    bags = make_bags()
    train(bags)
    schema = RowSchema.of(SLOTS)
    store: Any = Rows()
    share = ServerShare(store=store, index=0, replicas=1, schema=schema, num_threads=2, dump_percent=percent)
    peer = LocalPeer(CheckpointService(share))
    Checkpoints(lambda: [peer], deadline_s=20).dump(DumpRequest(tmp_path / "checkpoint"))
    assert given == [pytest.approx(expected)]


@pytest.mark.parametrize("lowers_priority", [False, True])
def test_a_dump_is_nice_only_where_nothing_trains(
    lowers_priority: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nice thread that holds the GIL would stall the training of its process."""

    def own_priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def write(*arguments: Any, **options: Any) -> FileEntry:
        priorities.append(own_priority())
        return write_shard_file(*arguments, **options)

    priorities: list[int] = []
    monkeypatch.setattr("persia.checkpoint.server_job.write_shard_file", write)
    before = own_priority()
    bags = make_bags()
    train(bags)
    schema = RowSchema.of(SLOTS)
    share = ServerShare(
        store=bags.store, index=0, replicas=1, schema=schema, num_threads=2, lowers_priority=lowers_priority
    )
    peer = LocalPeer(CheckpointService(share))
    Checkpoints(lambda: [peer], deadline_s=20).dump(DumpRequest(tmp_path / "checkpoint"))
    assert priorities == [max(10, before) if lowers_priority else before] * 2
    assert own_priority() == before
