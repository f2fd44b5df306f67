"""Inference at the embedding workers of a running job, by address alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from persia import env
from persia.ctx import InferCtx, TrainCtx, eval_ctx
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    UnavailableError,
)
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.service import get_embedding_worker_services
from persia.testing import LocalCluster
from tests.ports import free_port

SLOTS = {"slots_config": {"user": {"dim": 4}}}


@dataclasses.dataclass
class Served:
    """A trained cluster and the addresses of its embedding workers."""

    addresses: list[str]
    rows: np.ndarray[Any, Any]


def batch(requires_grad: bool = False) -> PersiaBatch:
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("user", np.array([1, 2, 3], np.uint64))],
        non_id_type_features=[NonIDTypeFeature(np.ones((3, 1), np.float32))],
        labels=[Label(np.ones((3, 1), np.float32))],
        requires_grad=requires_grad,
    )


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LocalCluster(embedding_config=SLOTS, embedding_workers=2, parameter_servers=2) as cluster:
        patch = pytest.MonkeyPatch()
        for name in ("PERSIA_NATS_URL", "PERSIA_JOB_NAME"):
            patch.setenv(name, cluster.env[name])
        env.reload_env()
        model = torch.nn.Linear(1, 1)
        rows = np.arange(12, dtype=np.float32).reshape(3, 4)
        with TrainCtx(
            SGD(0.1),
            torch.optim.SGD(model.parameters(), 0.1),
            model=model,
            mixed_precision=False,
            slots=SLOTS,
        ) as ctx:
            ctx.set_embedding("user", np.array([1, 2, 3], np.uint64), rows)
        with pytest.raises(Exception, match="embedding config"):
            TrainCtx(
                SGD(0.1),
                torch.optim.SGD(model.parameters(), 0.1),
                model=model,
                mixed_precision=False,
                slots={"slots_config": {"user": {"dim": 8}}},
            )
        patch.undo()
        env.reload_env()
        workers = Directory(cluster.session).wait_for(EMBEDDING_WORKER, 60.0)
        yield Served([worker.address for worker in workers], rows)


def embeddings(ctx: InferCtx, data: bytes) -> np.ndarray[Any, Any]:
    dense, (user,), labels = ctx.prepare_features(ctx.get_embedding_from_bytes(data))
    assert (dense[0].shape, labels) == ((3, 1), None)
    assert not user.requires_grad
    values: np.ndarray[Any, Any] = user.numpy()
    return values


def test_bug_4_inference_needs_neither_broker_nor_with(served: Served) -> None:
    ctx = InferCtx(served.addresses)
    ctx.wait_for_serving(120.0)
    sizes = ctx.get_embedding_size()
    for _ in range(3):  # lookups take turns
        np.testing.assert_array_equal(embeddings(ctx, batch().to_bytes()), served.rows)
    assert ctx.get_embedding_size() == sizes
    ctx.__exit__(None, None, None)
    with InferCtx(served.addresses, model=torch.nn.Identity()) as entered:
        np.testing.assert_array_equal(embeddings(entered, batch(True).to_bytes()), served.rows)


def test_inference_changes_nothing(served: Served) -> None:
    with InferCtx(served.addresses) as ctx:
        with pytest.raises(FailedPreconditionError, match="changes nothing"):
            ctx.clear_embeddings()
        with pytest.raises(FailedPreconditionError, match="changes nothing"):
            ctx.set_embedding("user", np.zeros(1, np.uint64), np.zeros((1, 4), np.float32))


def test_worker_that_does_not_serve_is_named(served: Served) -> None:
    match = r"at 127\.0\.0\.1:9 does not serve after 5 s"
    with (
        InferCtx([served.addresses[0], "127.0.0.1:9"]) as ctx,
        pytest.raises(DeadlineExceededError, match=match),
    ):
        ctx.wait_for_serving(5.0)


def test_lookups_pass_by_a_worker_that_is_down(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with InferCtx(["127.0.0.1:9", served.addresses[0]]) as ctx:
        for _ in range(4):
            np.testing.assert_array_equal(embeddings(ctx, batch().to_bytes()), served.rows)
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "3")
    env.reload_env()
    with (
        InferCtx(["127.0.0.1:9", "127.0.0.1:10"]) as ctx,
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9, 127\.0\.0\.1:10 answers within 3 s"),
    ):
        ctx.get_embedding_from_bytes(batch().to_bytes())
    monkeypatch.undo()
    env.reload_env()


@pytest.mark.parametrize(
    ("addresses", "error", "match"),
    [
        ([], InvalidArgumentError, "is empty"),
        ("host:1", InvalidTypeError, "pass a list"),
        (["host"], InvalidArgumentError, "'host': not like 'host:port'"),
    ],
)
def test_addresses_are_checked(addresses: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        InferCtx(addresses)


def test_services_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBEDDING_WORKER_SERVICE", raising=False)
    assert get_embedding_worker_services() == ["embedding_worker:8887"]
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", "10.0.0.7:1234")
    assert get_embedding_worker_services() == ["10.0.0.7:1234"]


def test_evaluations_inside_training_share_its_metrics_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(embedding_config=SLOTS) as cluster:
        for name in ("PERSIA_NATS_URL", "PERSIA_JOB_NAME"):
            monkeypatch.setenv(name, cluster.env[name])
        monkeypatch.setenv("PERSIA_METRICS_PORT", str(free_port()))
        env.reload_env()
        model = torch.nn.Linear(1, 1)
        dense = torch.optim.SGD(model.parameters(), 0.1)
        with TrainCtx(SGD(0.1), dense, model=model, mixed_precision=False, slots=SLOTS):
            for _ in range(2):  # a second port, or the first one taken, would end the training
                with eval_ctx(model=model) as evaluation:
                    assert evaluation.get_embedding_size() == [0]
    monkeypatch.undo()
    env.reload_env()
