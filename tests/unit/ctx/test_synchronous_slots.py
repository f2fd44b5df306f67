"""Slots that are looked up when their step begins, in jobs whose other slots are looked up ahead."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from persia.config import parse_embedding_config
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.data.dataset import IterableDatasetBase
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.errors import ConfigError, FailedPreconditionError, UnavailableError
from persia.observability.phases import LOOKUP_IN_STEP
from persia.pipeline.counters import ModeStaleness
from persia.pipeline.staleness import ALL_SLOTS
from tests.mode_batches import STEPS, local, make_batch, streamed

STALENESS, TIMEOUT_S = 4, 60.0
AHEAD, IN_STEP = 1, 2  # the bits of slots in the job's mode, and of synchronous ones


def slots(*synchronous: str) -> dict[str, Any]:
    raw = {"embedding_summation": False, "sample_fixed_size": 2}
    made: dict[str, dict[str, Any]] = {"first": {"dim": 4}, "second": {"dim": 4, **raw}, "third": {"dim": 2}}
    for name in synchronous:
        made[name]["consistency"] = "synchronous"
    return {"slots_config": made}


class Model(torch.nn.Module):
    """Learns nothing itself; the gradient of a row of `learns` depends on the row."""

    def __init__(self, learns: str) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self._learns = ["first", "second", "third"].index(learns)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return (embeddings[self._learns] ** 3).sum() + 0 * self.unused.sum()


class Ahead:
    """Lets the loop begin when as many batches as may be are looked up ahead."""

    def __init__(self, ctx: TrainCtx, monkeypatch: pytest.MonkeyPatch, num_batches: int) -> None:
        self.slots: list[int] = []
        self._changed = threading.Condition()
        self._num_batches = num_batches
        for name in ("lookup", "lookup_direct"):
            monkeypatch.setattr(ctx.runtime.backend, name, self._noting(getattr(ctx.runtime.backend, name)))

    def _noting(self, call: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            with self._changed:
                self.slots.append(kwargs["slots"])
                self._changed.notify_all()
            return result

        return noting

    def wait(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.slots) >= self._num_batches, TIMEOUT_S)


def trained_rows(
    learns: str,
    dataset: IterableDatasetBase,
    monkeypatch: pytest.MonkeyPatch,
    *synchronous: str,
    num_ahead: int | None = None,
    **mode: Any,
) -> tuple[np.ndarray[Any, Any], TrainCtx, Ahead]:
    """The embeddings of the slot that learns, after the training of all batches."""
    model = Model(learns)
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(emb_initialization=(-1.0, 1.0), seed=3),
        mixed_precision=False,
        slots=slots(*synchronous),
        **mode,
    ) as ctx:
        is_synchronous = mode.get("consistency") == "synchronous"
        num_ahead = num_ahead or (STALENESS if "consistency" not in mode else STEPS)
        ahead = Ahead(ctx, monkeypatch, 1 if is_synchronous else num_ahead)
        staleness = STALENESS if "consistency" not in mode else None
        for batch in DataLoader(dataset, forward_buffer_size=STEPS, embedding_staleness=staleness):
            ahead.wait()
            ctx.backward(ctx.forward(batch)[0])
        with eval_ctx(model=model) as evaluation, torch.no_grad():
            seen = evaluation.get_embedding_from_data(make_batch(requires_grad=False))
            tensors = seen.consume_all_id_type_feature_embedding_tensors()
    return tensors[["first", "second", "third"].index(learns)].numpy().copy(), ctx, ahead


@pytest.mark.parametrize("make_dataset", [local, streamed])
@pytest.mark.parametrize("mode", [{}, {"consistency": "asynchronous"}], ids=["hybrid", "asynchronous"])
@pytest.mark.parametrize("learns", ["first", "second"])
def test_it_learns_as_in_sequential_training_and_the_others_are_looked_up_ahead(
    learns: str, mode: dict[str, Any], make_dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequential, _, _ = trained_rows(learns, local(), monkeypatch, consistency="synchronous")
    rows, ctx, ahead = trained_rows(learns, make_dataset(), monkeypatch, learns, **mode)
    assert rows.tobytes() == sequential.tobytes()
    num_ahead = STEPS if mode else STALENESS
    assert ahead.slots[:num_ahead] == [AHEAD] * num_ahead
    assert ahead.slots.count(IN_STEP) == STEPS
    assert ctx.staleness.max == num_ahead - 1
    assert ctx.staleness.by_mode["synchronous"] == ModeStaleness()
    assert ctx.counters.batches_trained == ctx.counters.batches_received == STEPS


def test_a_slot_that_is_looked_up_ahead_learns_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sequential, _, _ = trained_rows("first", local(), monkeypatch, consistency="synchronous")
    stale, ctx, _ = trained_rows("first", local(), monkeypatch, "third")
    assert stale.tobytes() != sequential.tobytes()
    assert ctx.staleness.by_mode["hybrid"].max == ctx.staleness.max == STALENESS - 1
    assert ctx.staleness.by_mode["synchronous"].max == 0


def test_in_a_synchronous_job_there_is_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, ahead = trained_rows("first", local(), monkeypatch, "first", consistency="synchronous")
    assert ahead.slots[:STEPS] == [ALL_SLOTS] * STEPS


def test_a_job_of_synchronous_slots_alone_has_no_staleness(monkeypatch: pytest.MonkeyPatch) -> None:
    sequential, _, _ = trained_rows("first", local(), monkeypatch, consistency="synchronous")
    rows, ctx, lookups = trained_rows("first", local(), monkeypatch, "first", "second", "third", num_ahead=1)
    assert rows.tobytes() == sequential.tobytes()
    assert lookups.slots[:STEPS] == [ALL_SLOTS] * STEPS
    assert ctx.staleness.by_mode == {"synchronous": ModeStaleness()}


def training() -> TrainCtx:
    model = Model("first")
    return TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mixed_precision=False,
        slots=slots("first"),
    )


def test_the_lookup_in_the_step_is_a_phase_of_its_own() -> None:
    def num_timed() -> int:
        return sum(LOOKUP_IN_STEP.stats.snapshot()[0])

    before = num_timed()
    with training() as ctx:
        for batch in DataLoader(local()):
            ctx.backward(ctx.forward(batch)[0])
    assert num_timed() - before == STEPS


def test_a_batch_looked_up_by_hand_leaves_them_to_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with training() as ctx:
        ahead = Ahead(ctx, monkeypatch, 1)
        batch = ctx.get_embedding_from_data(make_batch())
        assert ahead.slots == [AHEAD]
        ctx.backward(ctx.forward(batch)[0])
        assert ahead.slots == [AHEAD, IN_STEP]


def test_a_batch_that_was_given_up_is_said_to_be() -> None:
    with training() as ctx:
        batches = iter(DataLoader(local(), embedding_staleness=1))
        first, second = next(batches), next(batches)
        with pytest.raises(FailedPreconditionError, match="batch 0 .* released because later ones"):
            ctx.forward(first)
        ctx.backward(ctx.forward(second)[0])


def test_a_lookup_that_fails_in_the_step_names_the_batch_and_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with training() as ctx:
        batches = iter(DataLoader(local()))
        batch = next(batches)

        def fail(*args: Any, **kwargs: Any) -> None:
            raise UnavailableError("embedding-worker 0 is gone")

        with monkeypatch.context() as patch:
            patch.setattr(ctx.runtime.backend, "lookup", fail)
            with pytest.raises(UnavailableError, match="lookup of the synchronous slots of batch 0"):
                ctx.forward(batch)
        ctx.backward(ctx.forward(batch)[0])
        for batch in batches:
            ctx.backward(ctx.forward(batch)[0])
    assert (ctx.counters.batches_trained, ctx.counters.batches_released) == (STEPS, 0)


def test_config_refuses_groups_that_disagree() -> None:
    config = slots("first")
    config["slots_config"]["third"]["dim"] = 4
    with pytest.raises(ConfigError, match="consistency or embedding_staleness differ"):
        parse_embedding_config({**config, "feature_groups": {"group": ["first", "third"]}})


def test_schemas_differ() -> None:
    assert (
        parse_embedding_config(slots()).schema_hash() != parse_embedding_config(slots("first")).schema_hash()
    )
