"""A training batch that nobody trains is given up, once, wherever it is dropped."""

from __future__ import annotations

import gc
from typing import Any

from persia._native import BatchReference
from persia.errors import UnavailableError
from persia.pipeline.counters import Counters
from persia.pipeline.lookup import BatchLease, LeaseReaper


class Owner:
    """Stands for the batch object of the training loop."""


def lease(number: int, settled: list[int]) -> BatchLease:
    return BatchLease(number, BatchReference(0, 1, number), lambda: settled.append(number))


def test_dropping_the_owner_releases_the_batch(fake_backend: Any) -> None:
    counters, settled = Counters(), list[int]()
    reaper = LeaseReaper(fake_backend, counters)
    owner = Owner()
    owner.cycle = owner  # type: ignore[attr-defined]  # only the collector can find it
    lease(1, settled).watch(owner, reaper)
    del owner
    gc.collect()
    reaper.close(30)
    assert fake_backend.released == [1]
    assert settled == [1]
    assert counters.snapshot().batches_released == 1


def test_acquired_batch_is_not_released(fake_backend: Any) -> None:
    settled: list[int] = []
    reaper = LeaseReaper(fake_backend, Counters())
    owner, acquired = Owner(), lease(1, settled)
    acquired.watch(owner, reaper)
    assert acquired.acquire()
    del owner
    reaper.close(30)
    assert fake_backend.released == []


def test_close_gives_up_what_the_script_still_holds(fake_backend: Any) -> None:
    settled: list[int] = []
    reaper = LeaseReaper(fake_backend, Counters())
    owner, held = Owner(), lease(1, settled)
    held.watch(owner, reaper)
    reaper.close(30)
    assert fake_backend.released == [1]
    assert not held.acquire()
    del owner  # finalizes: nothing happens twice
    assert settled == [1]


def test_release_that_fails_still_frees_the_permit(fake_backend: Any, log: Any) -> None:
    def fail(reference: BatchReference) -> None:
        raise UnavailableError("gone")

    fake_backend.release = fail
    counters, settled = Counters(), list[int]()
    reaper = LeaseReaper(fake_backend, counters)
    reaper.reap(lease(1, settled))
    reaper.close(30)
    assert settled == [1]
    assert counters.snapshot().batches_released == 1
    (record,) = log.records
    assert (record.getMessage(), record.batch_id) == ("batch 1 was not released at its worker: gone", 1)
