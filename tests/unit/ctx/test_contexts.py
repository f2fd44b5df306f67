"""Arguments, nesting and the duties of evaluation contexts."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from persia.ctx import BaseCtx, DataCtx, EmbeddingCtx, PreprocessMode, TrainCtx, cnt_ctx, eval_ctx
from persia.ctx.precision import Precision
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.errors import ConfigError, FailedPreconditionError, InvalidArgumentError, InvalidTypeError

MakeCtx = Callable[..., TrainCtx]


def test_the_innermost_context_is_current() -> None:
    assert cnt_ctx() is None
    with BaseCtx() as outer:
        assert cnt_ctx() is outer
        with BaseCtx() as inner:
            assert cnt_ctx() is inner
        assert cnt_ctx() is outer
    assert cnt_ctx() is None


def test_an_error_leaves_the_context_and_goes_on() -> None:
    with pytest.raises(KeyError), BaseCtx():
        raise KeyError("mine")
    assert cnt_ctx() is None


@pytest.mark.parametrize("device_id", [None, -1])
def test_no_device_is_the_cpu(device_id: int | None) -> None:
    assert BaseCtx(device_id=device_id).device is None


def test_device_that_is_not_there() -> None:
    with pytest.raises(InvalidArgumentError, match="device_id: 99 invalid!"):
        BaseCtx(device_id=99)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"embedding_optimizer": None}, InvalidTypeError, "embedding_optimizer is NoneType"),
        (
            {"embedding_optimizer": torch.optim.SGD([torch.zeros(1)])},
            InvalidTypeError,
            r"embedding_optimizer is torch\.optim\.sgd\.SGD: use one of persia",
        ),
        (
            {"embedding_optimizer": Adagrad},
            InvalidTypeError,
            r"is the class persia\.embedding\.optim\.\S*Adagrad: use .* such as Adagrad\(lr",
        ),
        ({"dense_optimizer": None}, InvalidTypeError, "dense_optimizer is NoneType"),
        ({"grad_scalar_update_factor": 0}, InvalidArgumentError, "grad_scalar_update_factor is 0"),
        ({"backward_buffer_size": 0}, InvalidArgumentError, "backward_buffer_size is 0"),
        ({"backward_workers_size": 0}, InvalidArgumentError, "backward_workers_size is 0"),
        ({"grad_update_buffer_size": 0}, InvalidArgumentError, "grad_update_buffer_size is 0"),
        ({"threadpool_worker_size": 0}, InvalidArgumentError, "threadpool_worker_size is 0"),
        ({"lookup_emb_directly": False}, InvalidArgumentError, "lookup_emb_directly"),
        ({"model": None}, InvalidArgumentError, "model not found"),
        (
            {"mixed_precision": True},
            InvalidArgumentError,
            "^mixed_precision=True needs a CUDA device: choose 'fp16'",
        ),
    ],
)
def test_train_ctx_refuses(
    make_ctx: MakeCtx, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make_ctx(**arguments)


@pytest.mark.parametrize(("device_id", "scaled"), [(None, False), (0, True)])
def test_mixed_precision_is_the_default_where_the_device_has_it(device_id: int | None, scaled: bool) -> None:
    assert inspect.signature(TrainCtx).parameters["mixed_precision"].default is None
    assert Precision.of(None, device_id) == Precision(scaled=scaled)


def test_without_broker_and_slots_both_ways_on_are_named() -> None:
    with pytest.raises(ConfigError, match=r"PERSIA_NATS_URL is not set.*slots=.*PERSIA_EMBEDDING_CONFIG"):
        eval_ctx()
    with pytest.raises(FailedPreconditionError, match=r"PERSIA_NATS_URL is not set.*persia-launcher"):
        DataCtx()


def test_loader_needs_a_context(make_dataset: Any) -> None:
    loader = DataLoader(make_dataset(1))
    with pytest.raises(FailedPreconditionError, match="inside a context"):
        next(iter(loader))
    with BaseCtx(), pytest.raises(FailedPreconditionError, match="inside a context"):
        next(iter(loader))


def test_streaming_needs_a_cluster(make_ctx: MakeCtx) -> None:
    with make_ctx(), pytest.raises(FailedPreconditionError, match="no connection of its own"):
        next(iter(DataLoader(StreamingDataset())))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"forward_buffer_size": 0}, "forward_buffer_size is 0"),
        ({"timeout_ms": 0}, "timeout_ms is 0"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"embedding_staleness": 0}, "embedding_staleness is 0"),
        ({"embedding_staleness": 1.5}, "embedding_staleness is 1.5"),
    ],
)
def test_loader_refuses(make_dataset: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        DataLoader(make_dataset(1), **arguments)


def test_loader_refuses_what_is_no_data_set() -> None:
    with pytest.raises(InvalidTypeError, match="dataset is a list"):
        DataLoader([])  # type: ignore[arg-type]


def test_reproducible_means_one_lookup_at_a_time_and_staleness_1(make_dataset: Any) -> None:
    loader = DataLoader(make_dataset(1), reproducible=True)
    assert (loader.num_workers, loader.embedding_staleness) == (1, 1)


def test_streaming_dataset_is_not_iterated_directly() -> None:
    with pytest.raises(NotImplementedError, match="DataLoader"):
        iter(StreamingDataset(10))


def test_evaluation_inside_training_shares_the_backend_and_changes_nothing(
    make_ctx: MakeCtx, new_batch: Any
) -> None:
    with make_ctx() as train:
        batch = train.get_embedding_from_data(new_batch(1))
        train.forward(batch)
        before = train.get_embedding_size()
        with eval_ctx(model=train.model) as evaluation:
            assert evaluation.runtime is train.runtime
            seen = evaluation.get_embedding_from_data(new_batch(1))
            evaluation.get_embedding_from_data(new_batch(77))
            assert not seen.consume_all_id_type_feature_embedding_tensors()[0].requires_grad
        assert train.get_embedding_size() == before
        with pytest.raises(FailedPreconditionError, match="only a TrainCtx"):
            evaluation.configure_embedding_parameter_servers(EmbeddingConfig())


def test_inference_returns_no_labels(make_ctx: MakeCtx, model: torch.nn.Module, new_batch: Any) -> None:
    with (
        make_ctx() as train,
        EmbeddingCtx(PreprocessMode.INFERENCE, model, backend=train.runtime.backend) as inference,
    ):
        output, labels = inference.forward(inference.get_embedding_from_bytes(new_batch(1).to_bytes()))
    assert output.shape == (3, 1)
    assert labels is None


def test_evaluation_without_model_says_so(make_ctx: MakeCtx, new_batch: Any) -> None:
    with make_ctx(), eval_ctx() as evaluation:
        batch = evaluation.get_embedding_from_data(new_batch(1))
        with pytest.raises(FailedPreconditionError, match="model not found, please init context with model"):
            evaluation.forward(batch)


def test_sigterm_unwinds_contexts() -> None:
    left: list[str] = []

    def script() -> None:
        with BaseCtx():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            finally:
                left.append("in order")

    with pytest.raises(SystemExit) as exit_info:
        script()
    assert exit_info.value.code == 128 + signal.SIGTERM
    assert left == ["in order"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_sigterm_handler_of_the_script_is_left_alone() -> None:
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with BaseCtx():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_device_is_that_of_the_context_around_it() -> None:
    with BaseCtx() as outer:
        outer.device_id = 0  # as on a machine with CUDA
        assert BaseCtx().device == torch.device("cuda", 0)
        assert BaseCtx(device_id=-1).device is None
    assert BaseCtx().device is None
