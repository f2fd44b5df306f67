"""Slots with bounds of their own, checked against what was applied when each of them was looked up."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from persia.config import parse_embedding_config
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.data.dataset import IterableDatasetBase
from persia.embedding.optim import SGD
from persia.errors import ConfigError, UnavailableError
from persia.pipeline.staleness import ALL_SLOTS
from tests.mode_batches import STEPS, local, make_batch, streamed

TIMEOUT_S = 60.0
ASYNCHRONOUS, SYNCHRONOUS = {"consistency": "asynchronous"}, {"consistency": "synchronous"}


def bounded(staleness: int) -> dict[str, Any]:
    return {"embedding_staleness": staleness}


def slots(*modes: dict[str, Any]) -> dict[str, Any]:
    raw = {"embedding_summation": False, "sample_fixed_size": 2}
    made: dict[str, dict[str, Any]] = {"first": {"dim": 4}, "second": {"dim": 4, **raw}, "third": {"dim": 2}}
    for slot, mode in zip(made.values(), modes, strict=True):
        slot.update(mode)
    return {"slots_config": made}


class Model(torch.nn.Module):
    """Passes a gradient of 1 to every element."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        assert [tuple(e.shape) for e in embeddings] == [(3, 4), (3, 2, 5), (3, 2)]
        return sum(e.sum() for e in embeddings) + 0 * self.unused.sum()


def training(modes: tuple[dict[str, Any], ...], consistency: str = "hybrid") -> TrainCtx:
    model = Model()
    return TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        backward_workers_size=1,  # updates in order: staleness is then known to the batch
        mixed_precision=False,
        consistency=consistency,
        slots=slots(*modes),
    )


class Recorder:
    """Notes which batches had been applied when a lookup of some slots of a batch began."""

    def __init__(self, ctx: TrainCtx, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._applied: set[int] = set()  # references
        self.lookups: dict[int, list[tuple[int, set[int]]]] = defaultdict(list)  # by slots
        for name in ("lookup", "lookup_direct"):
            monkeypatch.setattr(
                ctx.runtime.backend, name, self._noting_lookups(getattr(ctx.runtime.backend, name))
            )
        monkeypatch.setattr(
            ctx.runtime.backend, "return_gradients", self._noting(ctx.runtime.backend.return_gradients)
        )

    def _noting_lookups(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, slots: int, **kwargs: Any) -> Any:
            with self._changed:
                applied = set(self._applied)
            result = call(*args, slots=slots, **kwargs)
            with self._changed:
                self.lookups[slots].append((result.reference.reference, applied))
                self._changed.notify_all()
            return result

        return noting

    def _noting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(reference: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(reference, *args, **kwargs)
            with self._changed:
                self._applied.add(reference.reference)
            return result

        return noting

    def wait_for(self, num_lookups: dict[int, int]) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(len(self.lookups[slots]) >= n for slots, n in num_lookups.items()), TIMEOUT_S
            )

    def most_unseen(self, slots: int, references: list[int]) -> int:
        """The largest number of earlier batches that were not applied when a batch was looked up."""
        number = {reference: n for n, reference in enumerate(references)}
        assert len(self.lookups[slots]) == len(references)
        return max(
            sum(earlier not in applied for earlier in references[: number[reference]])
            for reference, applied in self.lookups[slots]
        )


JOBS = {
    "slots looser and tighter than a bounded job": (
        "hybrid",
        4,
        (ASYNCHRONOUS, bounded(2), {}),
        {"hybrid": (1, 4), "asynchronous": (2, STEPS), "hybrid 2": (4, 2)},
    ),
    "no slot as the job": (
        "hybrid",
        4,
        (SYNCHRONOUS, bounded(2), ASYNCHRONOUS),
        {"asynchronous": (1, STEPS), "hybrid 2": (2, 2), "synchronous": (4, 1)},
    ),
    "slots looser than a synchronous job": (
        "synchronous",
        None,
        (bounded(2), ASYNCHRONOUS, {}),
        {"synchronous": (1, 1), "asynchronous": (2, STEPS), "hybrid 2": (4, 2)},
    ),
    "bounds in an asynchronous job": (
        "asynchronous",
        None,
        (bounded(3), bounded(1), {}),
        {"asynchronous": (1, STEPS), "hybrid 1": (2, 1), "hybrid 3": (4, 3)},
    ),
    "a bound that is the job's": (
        "hybrid",
        4,
        (bounded(4), {}, {"consistency": "hybrid", "embedding_staleness": 2}),
        {"hybrid": (1 + 4, 4), "hybrid 4": (1 + 4, 4), "hybrid 2": (2, 2)},
    ),
    "one bound for all": ("hybrid", 4, (bounded(2),) * 3, {"hybrid 2": (ALL_SLOTS, 2)}),
}


@pytest.mark.parametrize("make_dataset", [local, streamed])
@pytest.mark.parametrize("job", JOBS)
def test_no_slot_sees_more_batches_in_flight_than_its_bound(
    job: str, make_dataset: Callable[[], IterableDatasetBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    consistency, staleness, modes, expected = JOBS[job]
    references: list[int] = []
    with training(modes, consistency) as ctx:
        recorder = Recorder(ctx, monkeypatch)
        loader = DataLoader(make_dataset(), forward_buffer_size=STEPS, embedding_staleness=staleness)
        for batch in loader:
            if not references:  # as many are looked up as can be before the first is trained
                recorder.wait_for({p: n for name, (p, n) in expected.items() if name != "synchronous"})
            references.append(batch.result.reference.reference)
            ctx.backward(ctx.forward(batch)[0])
    assert len(references) == STEPS
    for slots, bound in expected.values():
        assert recorder.most_unseen(slots, references) == bound - 1
    measured = ctx.staleness.by_mode
    assert {name: mode.max for name, mode in measured.items()} == {
        name: bound - 1 for name, (_, bound) in expected.items()
    }
    assert ctx.staleness.max == max(bound for _, bound in expected.values()) - 1
    assert ctx.staleness.in_flight == 0
    assert ctx.counters.batches_trained == ctx.counters.batches_received == STEPS


def test_a_script_that_skips_batches_does_not_wait_for_its_own_permits() -> None:
    held = []
    with training(({}, bounded(2), ASYNCHRONOUS)) as ctx:
        for number, batch in enumerate(DataLoader(local(), embedding_staleness=4)):
            held.append(batch)
            if number % 3 == 0:
                ctx.backward(ctx.forward(batch)[0])
    assert len(held) == STEPS
    assert (ctx.counters.batches_trained, ctx.counters.batches_released) == (4, 8)
    assert ctx.staleness.in_flight == 0


def test_dropped_batches_give_their_permits_back() -> None:
    with training(({}, bounded(2), ASYNCHRONOUS)) as ctx:
        assert sum(1 for _ in DataLoader(local(), embedding_staleness=4)) == STEPS
    assert ctx.counters.batches_released == STEPS


@pytest.mark.parametrize("make_dataset", [local, streamed])
def test_a_loop_that_is_left_early_leaves_no_thread_and_no_batch(
    make_dataset: Callable[[], IterableDatasetBase],
) -> None:
    with training((bounded(1), bounded(2), ASYNCHRONOUS)) as ctx:
        for batch in DataLoader(make_dataset()):
            ctx.backward(ctx.forward(batch)[0])
            break
    assert not [t.name for t in threading.enumerate() if t.name.startswith("persia-stage")]
    counts = ctx.counters
    assert counts.batches_trained == 1
    assert counts.batches_trained + counts.batches_released == counts.batches_received
    assert ctx.staleness.in_flight == 0


def test_a_later_lookup_that_fails_names_the_batch_and_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with training((bounded(2), {}, {})) as ctx:
        look_up = ctx.runtime.backend.lookup

        def fail_once(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(ctx.runtime.backend, "lookup", look_up)
            raise UnavailableError("embedding-worker 0 is gone")

        monkeypatch.setattr(ctx.runtime.backend, "lookup", fail_once)
        batches = iter(DataLoader(local()))
        with pytest.raises(UnavailableError, match="slots with embedding_staleness=2 of batch 0: .* is gone"):
            next(batches)
    counts = ctx.counters
    assert counts.batches_released == counts.batches_received
    assert ctx.staleness.in_flight == 0


def test_a_batch_looked_up_by_hand_has_no_bounds_but_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with training((SYNCHRONOUS, bounded(2), ASYNCHRONOUS)) as ctx:
        recorder = Recorder(ctx, monkeypatch)
        batch = ctx.get_embedding_from_data(make_batch())
        ctx.backward(ctx.forward(batch)[0])
    assert {slots: len(found) for slots, found in recorder.lookups.items()} == {1 + 2: 1, 4: 1}
    assert ctx.counters.batches_trained == 1


def test_reproducible_mode_says_what_slots_break_it(caplog: pytest.LogCaptureFixture) -> None:
    with training((bounded(3), SYNCHRONOUS, {})) as ctx:
        for batch in DataLoader(local(), reproducible=True):
            ctx.backward(ctx.forward(batch)[0])
    assert "slots of consistency='hybrid' (embedding_staleness=3) fixes the order" in caplog.text


@pytest.mark.parametrize(
    ("mode", "match"),
    [
        ({"consistency": "eventual"}, "slots_config.a.*'eventual' must be 'hybrid', 'synchronous' or 'async"),
        ({"consistency": "hybrid"}, "needs embedding_staleness"),
        ({"consistency": "synchronous", "embedding_staleness": 2}, "embedding_staleness=2 with consistency="),
        ({"consistency": "asynchronous", "embedding_staleness": 2}, "leave one of them out"),
        ({"embedding_staleness": 0}, "embedding_staleness"),
    ],
)
def test_config_refuses_contradictions(mode: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_embedding_config({"slots_config": {"a": {"dim": 4, **mode}}})


def test_config_refuses_more_modes_than_parts() -> None:
    def config(num_modes: int) -> dict[str, Any]:
        return {"slots_config": {f"s{i}": {"dim": 2, "embedding_staleness": i + 1} for i in range(num_modes)}}

    assert len(parse_embedding_config(config(32)).slot_modes) == 32
    with pytest.raises(ConfigError, match="33 different modes"):
        parse_embedding_config(config(33))


def test_schemas_differ() -> None:
    hashes = {
        parse_embedding_config(slots(mode, {}, {})).schema_hash()
        for mode in ({}, ASYNCHRONOUS, SYNCHRONOUS, bounded(2), bounded(3))
    }
    assert len(hashes) == 5
