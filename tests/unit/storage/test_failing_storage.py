"""Stores that fail half way, by faults in the methods of real file systems: what was there stays whole."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.errors import StorageError
from persia.storage import location as storage
from persia.storage.location import Location
from persia.storage.manifest import Manifest, utc_now
from tests.unit.checkpoint.conftest import (
    checkpoints_of,
    make_bags,
    make_server,
    rows_of,
    train,
    unchanged,
    without_ages,
)
from tests.unit.storage.test_location import through_arrow

ALWAYS = 10**9


class Faults:
    """Lets calls of `owner.method` fail that have `name` in a path: `times` of them, those behind the first
    `after`. With `late` they do what they are to do before they fail, as where an answer gets lost.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
        self.set(times=0)
        self.error: Exception = OSError(errno.EIO, "the wire is cut")
        real = getattr(owner, method)

        def call(*arguments: Any, **options: Any) -> Any:
            if not any(isinstance(value, str) and self._name in value for value in arguments):
                return real(*arguments, **options)
            self.num_calls += 1
            if not self._after < self.num_calls <= self._after + self._times:
                return real(*arguments, **options)
            self.failed.append(lambda: real(*arguments, **options))
            if self._late:
                real(*arguments, **options)
            raise self.error

        monkeypatch.setattr(owner, method, call)

    def set(self, name: str = "", *, after: int = 0, times: int = ALWAYS, late: bool = False) -> None:
        self._name, self._after, self._times, self._late = name, after, times, late
        self.num_calls = 0
        self.failed: list[Callable[[], Any]] = []


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PAUSES_S", (0.001,) * 4)


@pytest.fixture(params=["local", "memory"])
def dumped(request: Any, tmp_path: Path) -> Location:
    """A checkpoint of some thousand rows."""
    bags = make_bags()
    train(bags)
    place = Location.of(tmp_path / "c" if request.param == "local" else f"memory://{tmp_path}/c")
    checkpoints_of(bags).dump(DumpRequest(place, dense={"dense.pt": b"dense"}))
    return place


@pytest.fixture
def reads(dumped: Location, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch, type(dumped.file_system), "cat_file")


@pytest.fixture
def manifests(dumped: Location, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Of what makes a manifest appear."""
    if dumped.is_local:
        return Faults(monkeypatch, os, "replace")
    return Faults(monkeypatch, type(dumped.file_system), "pipe_file")


@pytest.fixture
def job(tmp_path: Path) -> Checkpoints:
    """Two stores with other rows than those of `dumped`."""
    bags = make_bags()
    train(bags, num_ids=500, seed=8)
    checkpoints_of(bags).dump(DumpRequest(tmp_path / "other"))
    job = checkpoints_of(*(make_server(index, 2) for index in range(2)))
    job.load(Source(tmp_path / "other"))
    return job


def test_a_read_that_fails_in_the_middle_of_a_load_changes_nothing(
    dumped: Location, reads: Faults, job: Checkpoints, tmp_path: Path
) -> None:
    source = Source(dumped)
    with unchanged(job, tmp_path):
        reads.set("/embeddings-", after=8)
        with pytest.raises(StorageError, match=r"\.emb could not be read: .*the wire is cut"):
            job.load(source)
        assert len(reads.failed) >= 5, "it was tried again"
        reads.set(times=0)


def test_what_fails_for_good_is_not_tried_again(dumped: Location, reads: Faults, job: Checkpoints) -> None:
    source = Source(dumped)
    reads.error = PermissionError(errno.EACCES, "not for you")
    reads.set("/embeddings-0-0")
    with pytest.raises(StorageError, match=r"embeddings-0-0\.emb could not be read: .*not for you"):
        job.load(source)
    assert len(reads.failed) <= 2, "once on each server"


def test_reads_that_fail_now_and_then_are_repeated(
    dumped: Location, reads: Faults, job: Checkpoints, tmp_path: Path
) -> None:
    reads.set("/embeddings-", after=8, times=4)
    job.load(Source(dumped))
    assert len(reads.failed) == 4
    job.dump(DumpRequest(tmp_path / "again"))
    assert np.array_equal(without_ages(rows_of(tmp_path / "again")), without_ages(rows_of(dumped)))


def test_a_read_that_fails_while_rows_are_replaced_leaves_them_incomplete_and_says_so(
    dumped: Location, reads: Faults, job: Checkpoints, tmp_path: Path
) -> None:
    reads.set("/embeddings-", after=ALWAYS)
    job.load(Source(dumped))
    reads.set("/embeddings-", after=reads.num_calls - 1)  # the last read: everything was checked before
    with pytest.raises(StorageError, match="rows of this server are incomplete now: load a checkpoint"):
        job.load(Source(dumped))
    reads.set(times=0)
    job.load(Source(dumped))
    job.dump(DumpRequest(tmp_path / "again"))
    assert np.array_equal(without_ages(rows_of(tmp_path / "again")), without_ages(rows_of(dumped)))


def test_a_manifest_that_cannot_be_written_leaves_the_checkpoint_that_was_there(
    dumped: Location, manifests: Faults
) -> None:
    before = rows_of(dumped)
    bags = make_bags()
    train(bags, num_ids=100)
    checkpoints = checkpoints_of(bags)
    manifests.set("/manifest.json")
    with pytest.raises(
        StorageError, match=r"manifest\.json could not be written: .*checkpoint before this dump is unchanged"
    ):
        checkpoints.dump(DumpRequest(dumped))
    assert len(manifests.failed) == (1 if dumped.is_local else 5), "services are asked again"
    assert np.array_equal(rows_of(dumped), before)
    assert Source(dumped).dense("dense.pt") == b"dense"
    manifests.set(times=0)
    broken_off_at = utc_now()
    while utc_now() == broken_off_at:  # what is left of a dump of the same second might be another job's
        time.sleep(0.05)
    checkpoints.dump(DumpRequest(dumped))
    assert len(rows_of(dumped)) < len(before)
    # The new rows, and the dense part of the dump before; nothing else stays.
    assert len([child for child in dumped.children() if child.name.startswith("dump-")]) == 2


@pytest.mark.parametrize("dumped", ["memory"], indirect=True)  # a disk is asked once
def test_a_manifest_is_written_again_until_the_service_takes_it(dumped: Location, manifests: Faults) -> None:
    bags = make_bags()
    train(bags, num_ids=100)
    manifests.set("/manifest.json", times=4)
    checkpoints_of(bags).dump(DumpRequest(dumped))
    assert len(manifests.failed) == 4
    assert len(rows_of(dumped)) <= 200


def test_a_manifest_whose_answer_was_lost_counts(dumped: Location, manifests: Faults) -> None:
    """Its files stay: they were removed, and neither checkpoint was left."""
    bags = make_bags()
    train(bags, num_ids=100)
    manifests.set("/manifest.json", late=True)
    checkpoints_of(bags).dump(DumpRequest(dumped))
    manifests.set(times=0)
    assert len(rows_of(dumped)) <= 200
    assert Source(dumped).dense("dense.pt") == b"dense"


@pytest.mark.parametrize("dumped", ["memory"], indirect=True)  # what a disk refuses does not come later
def test_a_manifest_that_arrives_after_the_error_has_its_files(dumped: Location, manifests: Faults) -> None:
    bags = make_bags()
    train(bags, num_ids=100)
    manifests.set("/manifest.json")
    with pytest.raises(StorageError):
        checkpoints_of(bags).dump(DumpRequest(dumped))
    manifests.failed[-1]()
    assert len(rows_of(dumped)) <= 200


@pytest.mark.parametrize("method", ["pipe_file", "mv", "rm_file", "exists", "makedirs"])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_a_swap_in_two_steps_may_fail_anywhere(
    method: str, after: int, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on HDFS, which renames over no file."""
    directory = through_arrow(tmp_path)
    file = directory / "manifest.json"
    file.replace(b"old")
    faults = Faults(monkeypatch, type(directory.file_system), method)
    faults.set(str(tmp_path), after=after, late=late)
    expected = b"new"
    try:
        file.replace(b"new")
    except StorageError:
        expected = b"old"
    faults.set(times=0)
    assert file.read_replaced(max_bytes=9) == expected
    file.replace(b"newer")
    assert file.read_replaced(max_bytes=9) == b"newer"


def test_a_manifest_of_a_directory_that_cannot_be_read_is_no_reason_to_remove_it(
    dumped: Location, reads: Faults
) -> None:
    """A dump that would keep the dense part cannot know what it is."""
    before = rows_of(dumped)
    bags = make_bags()
    train(bags, num_ids=100)
    reads.set("/manifest.json")
    with pytest.raises(StorageError, match=r"manifest\.json could not be read"):
        checkpoints_of(bags).dump(DumpRequest(dumped))
    reads.set(times=0)
    assert np.array_equal(rows_of(dumped), before)
    assert Manifest.read(dumped)[0].dense is not None
