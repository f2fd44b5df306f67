"""Checkpoints in place of which a part fails: who is told, and what the next ones and the next start find."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from persia.checkpoint import checkpoints, coordinator
from persia.checkpoint.checkpoints import DumpRequest, Source
from persia.checkpoint.coordinator import DumpOperation
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.protocol import IN_PLACE_NAME, Report, Request, Verb
from persia.checkpoint.service import CheckpointService
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.errors import FailedPreconditionError, InvalidArgumentError, StorageError, UnavailableError
from persia.storage.location import Location
from persia.storage.manifest import MANIFEST_NAME, EmbeddingSection, Manifest, make_dump_id, utc_now
from persia.tiers.commit_record import TierCheckpoint
from tests.unit.storage.test_failing_storage import Faults
from tests.unit.tiers.test_server_tier import NUM_ROWS, PoolJob, open_pool, prepare, storage_at


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pools").mkdir()
    return tmp_path / "pools"


class Peer(LocalPeer):
    """A server that can be ended, and may see another directory than the coordinator names."""

    def __init__(self, service: CheckpointService, directory: Path | None = None) -> None:
        super().__init__(service)
        self.service = service
        self._directory = directory
        self._is_silent = False

    def call(self, request: Request, timeout_s: float) -> Report:
        if self._is_silent:
            raise UnavailableError("nobody answers")
        if self._directory is not None and request.verb is Verb.DUMP:
            request = replace(request, arguments={**request.arguments, "directory": str(self._directory)})
        return super().call(request, timeout_s)

    def end(self) -> None:
        """As a server does that is told to."""
        self._is_silent = True
        self.service.close()


def job_at(root: Path, num_servers: int = 2, directory: Path | None = None, **options: Any) -> PoolJob:
    """Ready for a dump of ones; `options` of the services."""
    job = PoolJob(storage_at(root), num_servers)
    job.peers = [Peer(CheckpointService(share, **options), directory) for share in job.shares()]
    job.checkpoints = checkpoints.Checkpoints(lambda: job.peers, deadline_s=3)
    job.set_rows(1.0)
    return job


def die_during_step_2(
    job: PoolJob, place: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """Ends coordinator and servers where a dump in place would call that method."""

    def die(*_: object) -> None:
        for peer in job.peers:
            peer.end()
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, die)
        with pytest.raises(SystemExit):
            job.checkpoints.dump(DumpRequest(place, step=2, keep_last=2, in_place=True))


def before_publishing(monkeypatch: pytest.MonkeyPatch, action: Callable[[DumpOperation], None]) -> None:
    """Once: when servers have prepared all, and the manifest is not there yet."""
    publish = DumpOperation.publish

    def act_and_publish(operation: DumpOperation, manifest: bytes) -> None:
        monkeypatch.setattr(DumpOperation, "publish", publish)
        action(operation)
        publish(operation, manifest)

    monkeypatch.setattr(DumpOperation, "publish", act_and_publish)


def steps_after_a_start(root: Path, num_servers: int = 2) -> tuple[list[int | None], PoolJob]:
    job = PoolJob(storage_at(root), num_servers)
    return [pool.status()["step"] for pool in job.pools], job


@pytest.mark.parametrize("keep_last", [None, 2])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_server_that_starts_again_before_the_manifest_is_there_ends_the_dump(
    is_local: bool, keep_last: int | None, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave its part up, and the manifest counted all the same."""
    place = Location.of(tmp_path / "c" if is_local else f"memory://{tmp_path}/c")
    job = job_at(root)
    job.checkpoints.dump(DumpRequest(place, step=1, in_place=True, keep_last=keep_last))
    job.set_rows(2.0)

    def start_again(_: DumpOperation) -> None:
        job.peers[1].end()
        job.pools[1].close()
        open_pool(storage_at(root), 1, 2).close()

    before_publishing(monkeypatch, start_again)
    with pytest.raises(UnavailableError, match=r"a server has given dump-.* up: .* dump again"):
        job.checkpoints.dump(DumpRequest(place, step=2, in_place=True, keep_last=keep_last))
    job.leave()
    steps, job = steps_after_a_start(root)
    assert steps == [1, 1]
    job.checkpoints.load(Source(place))
    job.checkpoints.dump(DumpRequest(place, step=2, in_place=True, keep_last=keep_last))
    job.checkpoints.load(Source(place))
    job.leave()


def test_a_server_that_says_that_it_has_dropped_its_part_ends_the_dump(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(root)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))

    def lose(operation: DumpOperation) -> None:
        job.peers[1].call(Request(verb=Verb.CANCEL, operation=operation.operation), 1)

    before_publishing(monkeypatch, lose)
    with pytest.raises(UnavailableError, match="a server has given dump-"):
        job.checkpoints.dump(DumpRequest(tmp_path / "c", step=2, in_place=True))
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=3, in_place=True))
    job.checkpoints.load(Source(tmp_path / "c"))
    job.leave()


def test_one_of_a_manifest_and_a_server_that_gives_up_is_first(tmp_path: Path) -> None:
    """Two threads at once, many times: what the server decides is what can be read ever after."""

    def decide(checkpoint: TierCheckpoint, delay_s: float) -> bool:
        time.sleep(max(delay_s, 0.0))
        return checkpoint.decide()

    section = EmbeddingSection(
        dump_id="", created_at=utc_now(), train_config=None, schema=None, servers=(), files=(), in_place=True
    )
    delay_s, outcomes = 1e-3, set()
    with ThreadPoolExecutor(1) as server:
        for _ in range(200):
            operation = DumpOperation(make_dump_id(), (), 1, request=DumpRequest(tmp_path, in_place=True))
            operation.begin()
            content = Manifest().updated(1, None, replace(section, dump_id=operation.operation)).encode()
            checkpoint = TierCheckpoint(
                operation=operation.operation, directory=str(tmp_path), step=1, prepared={}
            )
            decision = server.submit(decide, checkpoint, delay_s)
            try:
                time.sleep(max(-delay_s, 0.0))
                operation.publish(content)
                counts = True
            except UnavailableError:
                counts = False
            assert decision.result() is counts is checkpoint.decide()
            outcomes.add(counts)
            delay_s += -5e-5 if counts else 5e-5  # to where both are equally fast
    assert outcomes == {True, False}


def test_a_storage_service_may_bring_the_manifest_too_late(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no step that fails once a server has given up; the dump says so at least."""
    place = Location.of(f"memory://{tmp_path}/c")
    job = job_at(root)
    write = Location.replace

    def start_again_and_write(self: Location, content: bytes) -> None:
        if self.name == MANIFEST_NAME:
            job.peers[1].end()
            job.pools[1].close()
            open_pool(storage_at(root), 1, 2).close()
        write(self, content)

    monkeypatch.setattr(Location, "replace", start_again_and_write)
    with pytest.raises(UnavailableError, match=r"lost while the manifest was on its way .* dump again"):
        job.checkpoints.dump(DumpRequest(place, step=1, in_place=True))
    job.leave()


def test_a_dump_that_is_ended_from_here_does_not_count(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(root)

    def end(operation: DumpOperation) -> None:
        operation.cancel()  # as `close` does, on another thread, while this one merges manifests

    before_publishing(monkeypatch, end)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True, blocking=False))
    with pytest.raises(FailedPreconditionError, match="was cancelled: dump again"):
        job.checkpoints.close(finish=True)
    assert not (tmp_path / "c" / MANIFEST_NAME).exists()
    job.leave()


def test_a_dump_that_counts_can_no_longer_be_ended(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(root)
    commit = DumpOperation.commit

    def end_and_commit(operation: DumpOperation) -> None:
        operation.cancel()
        commit(operation)

    monkeypatch.setattr(DumpOperation, "commit", end_and_commit)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    job.checkpoints.load(Source(tmp_path / "c"))
    job.leave()


@pytest.mark.parametrize("counts", [True, False])
def test_a_server_that_is_stopped_leaves_the_decision_to_its_next_start(
    counts: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(root)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))

    def end(operation: DumpOperation) -> None:
        job.peers[0].end()
        if not counts:
            operation.cancel()

    before_publishing(monkeypatch, end)
    if counts:
        job.checkpoints.dump(DumpRequest(tmp_path / "c", step=2, in_place=True))
    else:
        with pytest.raises(FailedPreconditionError, match="was cancelled"):
            job.checkpoints.dump(DumpRequest(tmp_path / "c", step=2, in_place=True))
    job.leave()
    steps, job = steps_after_a_start(root)
    assert steps == ([2, 2] if counts else [1, 1])
    job.checkpoints.load(Source(tmp_path / "c"))
    job.leave()


def test_servers_wait_while_the_dense_part_is_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(root, lease_s=1.0)
    write = checkpoints.write_files

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(2.5)
        return write(*arguments)

    monkeypatch.setattr(checkpoints, "write_files", write_slowly)
    monkeypatch.setattr(coordinator, "_KEEP_ALIVE_S", 0.05)
    dense = {"dense.pt": b"dense"}
    job.checkpoints.dump(DumpRequest(tmp_path / "c", dense=dense, step=1, in_place=True))
    assert job.peers[0].service._running() is None
    Source(tmp_path / "c")
    job.leave()


def test_rows_that_are_cleared_before_a_commit_cost_that_checkpoint_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(root)
    before_publishing(monkeypatch, lambda _: job.client.clear())
    with pytest.raises(StorageError, match="the rows were cleared or loaded since"):
        job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    job.set_rows(2.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=2, in_place=True))
    job.leave()
    steps, job = steps_after_a_start(root)
    assert steps == [2, 2]
    assert job.values(tmp_path / "after") == {2.0}
    job.leave()


def test_a_commit_that_could_not_be_noted_is_noted_later(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(root, num_servers=1)
    faults = Faults(monkeypatch, os, "replace")
    faults.set("server.json", after=1)  # all but the note of what is prepared
    with pytest.raises(StorageError, match="the wire is cut"):
        job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    faults.set(times=0)
    job.checkpoints.load(Source(tmp_path / "c"))
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=2, in_place=True))
    assert job.pools[0].status()["step"] == 2
    job.leave()


def test_latest_names_what_servers_will_go_back_to(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(root)
    job.checkpoints.dump(DumpRequest(tmp_path / "all", step=1, keep_last=2, in_place=True))

    die_during_step_2(job, tmp_path / "all", monkeypatch, DumpOperation, "commit")
    job.leave()
    steps, job = steps_after_a_start(root)
    assert steps == [2, 2]
    job.checkpoints.load(Source(tmp_path / "all"))
    with pytest.raises(FailedPreconditionError, match=r"\(step 2\) of .*/all/step-000000000002; load the"):
        job.checkpoints.load(Source(tmp_path / "all/step-000000000001"))
    job.leave()


def test_a_failed_dump_leaves_the_older_checkpoint_of_its_step(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody went back to step 1, and trains up to step 2 once more."""
    job, place = job_at(root), tmp_path / "all"
    for step in (1, 2):
        job.set_rows(float(step))
        job.checkpoints.dump(DumpRequest(place, step=step, keep_last=3))
    (place / "latest").write_text("step-000000000001\n")
    with monkeypatch.context() as patched:
        before_publishing(patched, lambda operation: operation._marker.remove())
        with pytest.raises(UnavailableError, match="has given .* up"):
            job.checkpoints.dump(DumpRequest(place, step=2, keep_last=3, in_place=True))
    job.checkpoints.load(Source(place / "step-000000000002"))
    assert job.values(tmp_path / "after") == {2.0}
    job.leave()


def test_a_coordinator_that_is_killed_before_latest_leaves_what_latest_names(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers went by the manifest alone, and then nobody could load what `latest` named."""
    job = job_at(root)
    job.checkpoints.dump(DumpRequest(tmp_path / "all", step=1, keep_last=2, in_place=True))
    job.set_rows(2.0)

    die_during_step_2(job, tmp_path / "all", monkeypatch, Location, "turn_into")
    assert (tmp_path / "all/step-000000000002" / MANIFEST_NAME).exists()
    job.leave()
    steps, job = steps_after_a_start(root)
    assert steps == [1, 1]
    job.checkpoints.load(Source(tmp_path / "all"))
    for _ in range(2):  # over what was left there, and over what is the latest already
        job.checkpoints.dump(DumpRequest(tmp_path / "all", step=2, keep_last=2, in_place=True))
        job.checkpoints.load(Source(tmp_path / "all"))
    job.leave()


def test_servers_that_see_another_directory_say_so(root: Path, tmp_path: Path) -> None:
    job = job_at(root, directory=tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"elsewhere, has to be one that all servers read"):
        job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    assert not (tmp_path / "c" / MANIFEST_NAME).exists()
    job.leave()


@pytest.mark.parametrize(("owner", "method"), [(AbstractFileSystem, "open"), (LocalFileSystem, "rm")])
def test_servers_that_may_not_write_beside_the_manifest_say_so(
    owner: type, method: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch, owner, method)
    faults.error = PermissionError(errno.EACCES, "not for you")
    job = job_at(root)
    faults.set("/server-1")
    with pytest.raises(
        StorageError, match=r"server-1 could not be .*not for you.* check the rights of its user"
    ):
        job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    assert faults.failed
    assert not (tmp_path / "c" / MANIFEST_NAME).exists()
    faults.set(times=0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=2, in_place=True))
    job.checkpoints.load(Source(tmp_path / "c"))
    job.leave()


def test_a_server_does_not_start_without_the_directory_that_tells_what_counts(
    root: Path, tmp_path: Path
) -> None:
    job = job_at(root)
    (tmp_path / "c").mkdir()
    manifest = prepare(job, tmp_path / "c", step=1)
    (tmp_path / "c" / MANIFEST_NAME).write_bytes(manifest.encode())
    job.leave()
    (tmp_path / "c").rename(tmp_path / "not mounted")
    with pytest.raises(StorageError, match=r"/c is no directory of this machine, .*mount it"):
        open_pool(storage_at(root), 0, 2)
    (tmp_path / "not mounted").rename(tmp_path / "c")
    steps, job = steps_after_a_start(root)
    assert steps == [1, 1]
    job.leave()


@pytest.mark.parametrize("options", [{"fresh_state": True}, {"with_state": False}])
def test_rows_in_place_keep_their_state(options: dict[str, bool], root: Path, tmp_path: Path) -> None:
    job = job_at(root)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", in_place=True))
    with pytest.raises(InvalidArgumentError, match=r"--without-state\) is for checkpoints in files"):
        job.checkpoints.load(Source(tmp_path / "c"), **options)
    job.leave()


def test_small_rows_stay_in_place(root: Path, tmp_path: Path) -> None:
    job = PoolJob(storage_at(root))
    job.client.configure(Adagrad(lr=0.1).train_config(EmbeddingConfig(min_norm=1e6)))
    job.set_rows(1.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", in_place=True))
    assert sum(pool.stats()["num_rows"] for pool in job.pools) == NUM_ROWS
    job.checkpoints.dump(DumpRequest(tmp_path / "files"))
    assert sum(pool.stats()["num_rows"] for pool in job.pools) == 0
    job.leave()


def test_a_pool_that_was_removed_has_no_checkpoint(root: Path, tmp_path: Path) -> None:
    job = job_at(root)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    job.set_rows(2.0)
    manifest = prepare(job, tmp_path / "c", step=2)
    assert manifest.embeddings is not None
    marker = tmp_path / "c" / manifest.embeddings.dump_id / IN_PLACE_NAME
    marker.parent.mkdir()
    marker.write_bytes(b"")
    job.leave()
    for index in range(2):
        (root / f"server-{index}/rows.pool").unlink()
        (root / f"server-{index}/rules").unlink()
    steps, job = steps_after_a_start(root)
    assert steps == [None, None]
    assert not marker.exists(), "a coordinator that goes on would name rows that are gone"
    with pytest.raises(FailedPreconditionError, match="it has none"):
        job.checkpoints.load(Source(tmp_path / "c"))
    job.leave()
