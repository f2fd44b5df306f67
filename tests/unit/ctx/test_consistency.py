"""What each consistency mode lets happen between a lookup and the updates before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.errors import InvalidArgumentError

MakeCtx = Callable[..., TrainCtx]


class Recorder:
    """Takes notes of when lookups begin and updates have ended."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._lock = threading.Lock()
        for name in ("lookup_direct", "return_gradients"):
            monkeypatch.setattr(backend, name, self._wrapped(getattr(backend, name), name))

    def _wrapped(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "lookup_direct":
                self.note("lookup")
            result = call(*args, **kwargs)
            if name == "return_gradients":
                self.note("update")
            return result

        return wrapped

    def note(self, event: str) -> None:
        with self._lock:
            self.events.append(event)


@pytest.fixture
def recorder(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(backend, monkeypatch)


def train(ctx: TrainCtx, loader: DataLoader, note: Callable[[str], None] = lambda event: None) -> None:
    for batch in loader:
        note("batch")
        ctx.backward(ctx.forward(batch)[0].sum())
        note("step")


def test_synchronous_steps_alternate_strictly(
    make_ctx: MakeCtx, make_dataset: Any, recorder: Recorder
) -> None:
    with make_ctx(consistency="synchronous") as ctx:
        train(ctx, DataLoader(make_dataset(8)), recorder.note)
        assert ctx.staleness.max == 0
    assert recorder.events == ["lookup", "batch", "update", "step"] * 8


def test_synchronous_training_may_skip_batches(make_ctx: MakeCtx, make_dataset: Any) -> None:
    with make_ctx(consistency="synchronous") as ctx:
        for number, batch in enumerate(DataLoader(make_dataset(6))):
            output, _ = ctx.forward(batch)
            if number % 2:
                ctx.backward(output.sum())
    assert (ctx.counters.batches_trained, ctx.counters.batches_released) == (3, 3)


def test_asynchronous_lookups_do_not_wait(make_ctx: MakeCtx, make_dataset: Any, recorder: Recorder) -> None:
    with make_ctx(consistency="asynchronous") as ctx:
        loader = DataLoader(make_dataset(8), forward_buffer_size=8)
        batches = iter(loader)
        first = next(batches)
        held = [first, *batches]  # all are looked up before any is updated
        assert recorder.events == ["lookup"] * 8
        ctx.backward(sum(ctx.forward(batch)[0].sum() for batch in held))
        ctx.wait_for_gradients()
        assert ctx.staleness.max == 7
    assert ctx.counters.batches_trained == 8


@pytest.mark.parametrize(
    ("mode", "loader", "match"),
    [
        ("synchronous", {"embedding_staleness": 2}, "with consistency='synchronous'"),
        ("asynchronous", {"embedding_staleness": 2}, "leaves unbounded"),
        ("asynchronous", {"reproducible": True}, "reproducible=True"),
    ],
)
def test_contradicting_bounds_are_refused(
    make_ctx: MakeCtx, make_dataset: Any, mode: str, loader: dict[str, Any], match: str
) -> None:
    with make_ctx(consistency=mode), pytest.raises(InvalidArgumentError, match=match):
        next(iter(DataLoader(make_dataset(1), **loader)))


def test_unknown_mode_names_the_choices(make_ctx: MakeCtx) -> None:
    with pytest.raises(InvalidArgumentError, match="'eventual': choose one of 'hybrid', 'synchronous'"):
        make_ctx(consistency="eventual")
