"""Lost rows end a training wherever it is, and a server that does not answer ends no periodic dump."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from persia.ctx import Recovery, TrainCtx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import DeadlineExceededError, InvalidArgumentError, RowsLostError
from persia.job.lost_rows import OnLostRows, RowsGuard
from persia.messaging.discovery import Advertiser, Directory, ServiceInfo
from persia.messaging.local_session import LocalBroker, LocalSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER

SLOTS = {"feature_index_prefix_bit": 8, "slots_config": {"a": {"dim": 4}, "b": {"dim": 4}}}


def make_ctx(model: torch.nn.Module, **options: Any) -> TrainCtx:
    return TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.1, 0.1)),
        slots=SLOTS,
        mixed_precision=False,
        **options,
    )


@pytest.fixture
def ctx(model: torch.nn.Module) -> Iterator[TrainCtx]:
    with make_ctx(model) as ctx:
        yield ctx


def start(session: LocalSession, incarnation: int, **more: Any) -> Advertiser:
    role = EMBEDDING_PARAMETER_SERVER
    info = ServiceInfo(role=role, incarnation=incarnation, **{"index": 0, "replicas": 1, **more})
    server = Advertiser(session, info)
    server.start()
    return server


def test_rows_that_are_lost_outside_of_a_loop_are_raised_by_the_next(
    ctx: TrainCtx, make_dataset: Any, new_batch: Callable[[int], Any]
) -> None:
    session = LocalSession(LocalBroker(), name="test")
    first = start(session, 1)
    guard = RowsGuard(Directory(session), OnLostRows.RAISE, ctx._pipeline.fail)
    ctx._pipeline.check_rows = guard.raise_known
    assert len(list(DataLoader(make_dataset(2)))) == 2
    first.stop()
    start(session, 2)
    with pytest.raises(RowsLostError):
        list(DataLoader(make_dataset(2)))
    with pytest.raises(RowsLostError):
        ctx.get_embedding_from_data(new_batch(1))
    guard.loaded(guard.missing())
    assert len(list(DataLoader(make_dataset(2)))) == 2


def test_a_server_that_was_replaced_and_wakes_is_not_taken_for_a_restart(ctx: TrainCtx) -> None:
    session = LocalSession(LocalBroker(), name="test")
    successor = start(session, 2, term=2, has_rows=True)
    guard = RowsGuard(Directory(session), OnLostRows.RAISE, ctx._pipeline.fail)
    successor.stop()  # it is not heard, for once
    predecessor = start(session, 1, term=1)
    guard.check()
    predecessor.stop()
    start(session, 3, term=3)
    with pytest.raises(RowsLostError):
        guard.check()


def test_servers_of_another_number_have_the_rows_unless_they_have_restarted() -> None:
    session = LocalSession(LocalBroker(), name="test")
    first = start(session, 1)
    guard = RowsGuard(Directory(session), OnLostRows.RAISE, lambda _: None)
    first.stop()
    second = start(session, 2, generation=1, has_rows=True)
    guard.check()
    second.stop()
    start(session, 3, generation=2)  # its predecessor of this generation was never seen
    with pytest.raises(RowsLostError):
        guard.check()


def test_a_server_more_that_has_no_rows_has_lost_those_of_the_servers_before() -> None:
    session = LocalSession(LocalBroker(), name="test")
    first = start(session, 1)
    guard = RowsGuard(Directory(session), OnLostRows.RAISE, lambda _: None)
    first.stop()
    start(session, 2, replicas=2, generation=1, has_rows=True)
    start(session, 3, index=1, replicas=2, generation=1)
    with pytest.raises(RowsLostError):
        guard.check()


def test_rows_that_are_lost_during_a_load_stay_lost() -> None:
    session = LocalSession(LocalBroker(), name="test")
    first = start(session, 1)
    guard = RowsGuard(Directory(session), OnLostRows.RAISE, lambda _: None)
    first.stop()
    second = start(session, 2)
    missing = guard.missing()
    second.stop()
    start(session, 3)
    guard.loaded(missing)
    with pytest.raises(RowsLostError):
        guard.check()
    guard.loaded(guard.missing())
    guard.check()


def test_a_dump_that_is_logged_survives_servers_that_do_not_answer(ctx: TrainCtx, tmp_path: Path) -> None:
    def check() -> None:
        raise DeadlineExceededError("embedding-parameter-server 0 of 1 missing")

    ctx._rows_guard = SimpleNamespace(check=check)  # type: ignore[assignment]
    ctx.dump_checkpoint(tmp_path / "1", on_error="log")
    assert ctx.counters.dumps_failed == 1
    with pytest.raises(DeadlineExceededError):
        ctx.dump_checkpoint(tmp_path / "1")


def test_a_roll_back_ends_a_script_that_catches_the_error(
    model: torch.nn.Module, make_dataset: Any, tmp_path: Path
) -> None:
    session = LocalSession(LocalBroker(), name="test")
    first = start(session, 1)
    ctx = make_ctx(model, recovery=Recovery(tmp_path), on_lost_rows="recover")

    def script() -> None:
        with ctx:
            guard = RowsGuard(Directory(session), OnLostRows.RECOVER, ctx._pipeline.fail)
            ctx._rows_guard, ctx._pipeline.check_rows = guard, guard.raise_known
            first.stop()
            start(session, 2)
            with pytest.raises(RowsLostError):
                list(DataLoader(make_dataset(2)))
            with pytest.raises(RowsLostError):
                ctx.dump_checkpoint(tmp_path / "1")

    with pytest.raises(SystemExit) as ended:
        script()
    assert ended.value.code == 75


@pytest.mark.parametrize("loads", [True, False])
def test_there_is_no_roll_back_without_need(model: torch.nn.Module, tmp_path: Path, loads: bool) -> None:
    session = LocalSession(LocalBroker(), name="test")
    first = start(session, 1)
    with make_ctx(model, recovery=Recovery(tmp_path), on_lost_rows="recover") as ctx:
        ctx._rows_guard = guard = RowsGuard(Directory(session), OnLostRows.RECOVER, ctx._pipeline.fail)
        if loads:
            first.stop()
            start(session, 2)
            guard.loaded(guard.missing())


def test_a_roll_back_needs_checkpoints(model: torch.nn.Module) -> None:
    with pytest.raises(InvalidArgumentError, match="pass recovery=Recovery"):
        make_ctx(model, on_lost_rows="recover")
    with pytest.raises(InvalidArgumentError, match="'raise', 'recover', 'continue'"):
        make_ctx(model, on_lost_rows="ignore")
