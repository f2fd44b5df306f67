"""The dense part of checkpoints: written in one step, over old ones, and read back without trust."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from persia.ctx import TrainCtx, dense_checkpoint, eval_ctx
from persia.errors import InvalidArgumentError, NotFoundError, StorageError

MakeCtx = Callable[..., TrainCtx]


def test_dump_twice_and_load(
    make_ctx: MakeCtx, model: torch.nn.Module, tmp_path: Path, new_batch: Any
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with make_ctx(dense_optimizer=optimizer) as ctx:
        ctx.dump_checkpoint(tmp_path / "c")
        ctx.backward(ctx.forward(ctx.get_embedding_from_data(new_batch(1)))[0].sum())
        ctx.dump_checkpoint(tmp_path / "c", with_jit_model=True)
        assert sorted(os.listdir(tmp_path / "c")) == ["dense.pt", "jit_dense.pt", "opt.pt"]
        trained = {key: value.clone() for key, value in model.state_dict().items()}
        momentum = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()

        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        optimizer.state.clear()
        ctx.load_checkpoint(tmp_path / "c")
    assert all(torch.equal(model.state_dict()[key], value) for key, value in trained.items())
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], momentum)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_equals_the_model(make_ctx: MakeCtx, model: torch.nn.Module, tmp_path: Path) -> None:
    with make_ctx() as ctx:
        ctx.dump_checkpoint(tmp_path, with_jit_model=True)
    inputs = ([torch.ones(2, 1)], [torch.ones(2, 4), torch.ones(2, 4)])
    assert torch.equal(torch.jit.load(tmp_path / "jit_dense.pt")(*inputs), model(*inputs))


def test_evaluation_loads_what_training_dumped(
    make_ctx: MakeCtx, tmp_path: Path, model: torch.nn.Module
) -> None:
    with make_ctx() as ctx:
        ctx.dump_checkpoint(tmp_path)
        other = type(model)()
        with eval_ctx(model=other) as evaluation:
            evaluation.load_checkpoint(tmp_path)
    assert torch.equal(other.linear.weight, model.linear.weight)


def test_missing_file_is_named(make_ctx: MakeCtx, tmp_path: Path) -> None:
    with make_ctx() as ctx:
        with pytest.raises(NotFoundError, match=r"dense\.pt does not exist"):
            ctx.load_checkpoint(tmp_path)
        ctx.dump_torch_state_dict(ctx.model, tmp_path, "dense.pt")
        with pytest.raises(NotFoundError, match=r"opt\.pt does not exist"):
            ctx.load_checkpoint(tmp_path)


def test_storage_services_are_not_there_yet(make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx, pytest.raises(InvalidArgumentError, match="hdfs://x/y: only local paths"):
        ctx.dump_checkpoint("hdfs://x/y")


def test_failed_write_leaves_the_old_file_and_nothing_else(model: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "dense.pt"
    dense_checkpoint.dump_state_dict(model, path)
    before = path.read_bytes()

    class Broken(torch.nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        dense_checkpoint.dump_state_dict(Broken(), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["dense.pt"]


def test_keys_of_a_ddp_wrapper_are_accepted(model: torch.nn.Module, tmp_path: Path) -> None:
    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, tmp_path / "old.pt")
    other = type(model)()
    dense_checkpoint.load_state_dict(other, tmp_path / "old.pt")
    assert torch.equal(other.linear.weight, model.linear.weight)


def test_nothing_but_tensors_is_unpickled(model: torch.nn.Module, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "pwned"),))

    torch.save({"linear.weight": Evil()}, tmp_path / "dense.pt")
    with pytest.raises(pickle.UnpicklingError):
        dense_checkpoint.load_state_dict(model, tmp_path / "dense.pt")
    assert not (tmp_path / "pwned").exists()


def test_optimizer_has_no_torchscript(make_ctx: MakeCtx, tmp_path: Path) -> None:
    with make_ctx() as ctx, pytest.raises(InvalidArgumentError, match="is_jit"):
        ctx.dump_torch_state_dict(ctx.dense_optimizer, tmp_path, "x", is_jit=True)


def test_model_that_cannot_be_scripted_costs_only_its_torchscript(make_ctx: MakeCtx, tmp_path: Path) -> None:
    class Unscriptable(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, dense, embeddings):  # type: ignore[no-untyped-def]
            first, second = embeddings
            return self.linear(dense[0]) + first + second

    with (
        make_ctx(model=Unscriptable()) as ctx,
        pytest.raises(InvalidArgumentError, match=r"jit_dense\.pt was not written: .*Unscriptable; annotate"),
    ):
        ctx.dump_checkpoint(tmp_path, with_jit_model=True)
    assert sorted(os.listdir(tmp_path)) == ["dense.pt", "opt.pt"]


def test_rank_0_writes_for_all(make_ctx: MakeCtx, tmp_path: Path) -> None:
    with make_ctx() as ctx:
        ctx.rank = 1
        ctx.dump_checkpoint(tmp_path)
        ctx.rank = 0
    assert os.listdir(tmp_path) == []
