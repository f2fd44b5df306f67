"""The simulation of the protocol: a few seeds, those that found bugs, and planted bugs that it must find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("greenlet", reason="needs the 'test' extra: pip install 'persia[test]'")

from benchmarks.simulation import job, kernel, scenario
from benchmarks.simulation.library import PATH, Library
from benchmarks.simulation.scenario import Outcome, run_seed, undisturbed
from benchmarks.simulation.seeds import pool_of, run_seeds
from persia._native import BatchReference
from persia.messaging.discovery import ServiceInfo
from persia.pipeline import backend
from persia.roles import embedding_worker, standby

pytestmark = pytest.mark.skipif(not PATH.exists(), reason="./run test and ./run simulate build the library")

# Each has failed: ADR 50 lists the bugs. What they draw has changed since.
FOUND_BUGS = (60, 163, 239, 355, 361, 491, 509, 1199, 1320, 2240, 3132, 3481, 3921, 4249, 4313, 5244, 21020)


def in_a_process(function: Callable[[], list[Outcome]]) -> list[Outcome]:
    """What killed processes of the simulation held is freed with the real one."""
    with pool_of(1) as pool:
        return pool.submit(function).result()


def run(*seeds: int) -> list[Outcome]:
    library = Library()
    expected = undisturbed(library)
    return [run_seed(library, seed, expected=expected) for seed in seeds]


def found_bugs() -> list[Outcome]:
    return run(*FOUND_BUGS)


def forwards() -> list[Outcome]:
    return run(*range(1, 25))


def backwards() -> list[Outcome]:
    return run(*range(24, 0, -1))


def first_failure() -> list[Outcome]:
    library = Library()
    expected = undisturbed(library)
    for seed in range(1, 101):
        outcome = run_seed(library, seed, expected=expected)
        if outcome.failure:
            return [outcome]
    return []


def without_the_first_reference() -> list[Outcome]:
    """A planted bug: a batch that another worker takes over is updated under another key."""
    register = backend.ClusterBackend.register

    def forgetful(self: backend.ClusterBackend, ids: bytes, original: BatchReference) -> BatchReference:
        return register(self, ids, BatchReference(original.worker_index, 0, 0))

    backend.ClusterBackend.register = forgetful  # type: ignore[method-assign, assignment]
    return first_failure()


def without_asking_who_has_the_rows() -> list[Outcome]:
    """A planted bug: a process that starts does not become the standby of the one that has the rows."""
    for module in (job, standby):
        setattr(module, "starts_as_standby", lambda *_: False)  # noqa: B010
    return first_failure()


def without_successors_of_the_second_server() -> list[Outcome]:
    """A planted bug, seen with two servers: workers ignore who replaces the second one."""
    connect = embedding_worker.ServerLinks.connect

    def ignorant(self: embedding_worker.ServerLinks, server: ServiceInfo) -> None:
        if server.index not in self._servers or server.index == 0:
            connect(self, server)

    embedding_worker.ServerLinks.connect = ignorant  # type: ignore[method-assign]
    return first_failure()


def without_a_new_copy_of_loaded_rows() -> list[Outcome]:
    """A planted bug, seen after a roll-back: the standby keeps its rows when a checkpoint is loaded."""
    standby.Primary._release_for_load = lambda self: None  # type: ignore[method-assign]
    return first_failure()


def without_places_for_the_next_rank() -> list[Outcome]:
    """A planted bug, seen after several roll-backs: workers keep the batches of ranks that have died."""
    scenario._ROLLS_BACK = 1.0
    embedding_worker.release_waiting = lambda *_: None
    return first_failure()


def without_an_end() -> list[Outcome]:
    kernel._MAX_STEPS = 10_000

    def spin(self: job.Job, process: kernel.Process, index: int) -> None:
        while True:
            self.kernel.sleep(0.0)

    job.Job._load = spin  # type: ignore[method-assign]
    return [run_seed(Library(), 1, expected={})]


def test_a_seed_in_which_no_time_passes_fails() -> None:
    assert [outcome.failure for outcome in in_a_process(without_an_end)] == ["no end within 10000 steps"]


def test_the_protocol_holds_under_faults() -> None:
    outcomes, _ = run_seeds(range(1, 61), processes=2)
    assert {outcome.seed: outcome.failure for outcome in outcomes if outcome.failure} == {}
    assert sum(sum(outcome.faults.values()) for outcome in outcomes) > 60


def test_seeds_that_found_bugs_hold() -> None:
    assert [outcome.failure for outcome in in_a_process(found_bugs)] == [""] * len(FOUND_BUGS)


def test_seeds_repeat_in_another_process_and_order() -> None:
    """Addresses and hashes differ there."""
    assert in_a_process(forwards) == in_a_process(backwards)[::-1]


@pytest.mark.parametrize(
    "planted",
    [
        without_the_first_reference,
        without_asking_who_has_the_rows,
        without_successors_of_the_second_server,
        without_a_new_copy_of_loaded_rows,
        without_places_for_the_next_rank,
    ],
)
def test_planted_bugs_are_found(planted: Callable[[], list[Outcome]]) -> None:
    assert in_a_process(planted)
