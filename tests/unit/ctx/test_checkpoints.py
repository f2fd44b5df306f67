"""Checkpoints through contexts: dense part, optimizer, TorchScript and rows together, in one step."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import distributed as dist

from persia.checkpoint.checkpoints import Source
from persia.ctx import TrainCtx, eval_ctx
from persia.distributed import DDPOption
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad
from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    NotFoundError,
    StorageError,
)
from persia.rows.reader import RowReader
from persia.storage import dense
from persia.storage import location as storage
from persia.storage.location import Location

MakeCtx = Callable[..., TrainCtx]


def files_of(directory: Path) -> list[str]:
    """Without the folders of dumps."""
    return sorted(name for name in os.listdir(directory) if not name.startswith("dump-"))


def train(ctx: TrainCtx, batch: Any) -> float:
    output, _ = ctx.forward(ctx.get_embedding_from_data(batch))
    loss = output.square().sum()
    ctx.backward(loss)
    ctx.wait_for_gradients()
    return float(loss.item())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_bug_5_dump_twice_and_load(
    make_ctx: MakeCtx, model: torch.nn.Module, tmp_path: Path, new_batch: Any
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with make_ctx(dense_optimizer=optimizer) as ctx:
        ctx.dump_checkpoint(tmp_path / "c")
        train(ctx, new_batch(1))
        ctx.dump_checkpoint(tmp_path / "c", with_jit_model=True)
        assert files_of(tmp_path / "c") == ["dense.pt", "jit_dense.pt", "manifest.json", "opt.pt"]
        trained = {key: value.clone() for key, value in model.state_dict().items()}
        momentum = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
        expected = train(ctx, new_batch(1))
        train(ctx, new_batch(2))
        assert ctx.step == 3

        ctx.load_checkpoint(tmp_path / "c")
        assert ctx.step == 1
        assert all(torch.equal(model.state_dict()[key], value) for key, value in trained.items())
        assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], momentum)
        assert train(ctx, new_batch(1)) == expected


def test_bug_6_embeddings_by_themselves_in_the_background(
    make_ctx: MakeCtx, tmp_path: Path, new_batch: Any
) -> None:
    with make_ctx() as ctx:
        train(ctx, new_batch(1))
        ctx.dump_embedding(tmp_path / "c", blocking=False)
        ctx.wait_for_dump_embedding()
        (size,) = ctx.get_embedding_size()
        ctx.clear_embeddings()
        ctx.load_embedding(tmp_path / "c", blocking=False)
        ctx.wait_for_load_embedding()
        assert ctx.get_embedding_size() == [size]
        assert files_of(tmp_path / "c") == ["manifest.json"]
        with pytest.raises(NotFoundError, match="nothing has no embeddings"):
            ctx.load_embedding(tmp_path / "nothing")


def test_rows_without_state_are_trained_on_only_when_asked(
    make_ctx: MakeCtx, model: torch.nn.Module, tmp_path: Path, new_batch: Any
) -> None:
    with make_ctx(embedding_optimizer=Adagrad(lr=0.1)) as ctx:
        train(ctx, new_batch(1))
        ctx.dump_checkpoint(tmp_path / "c")
        ctx.dump_embedding(tmp_path / "c", with_state=False)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        expected = train(ctx, new_batch(1))
        for load in (ctx.load_checkpoint, ctx.load_embedding):
            with pytest.raises(FailedPreconditionError, match="without the optimizer's state"):
                load(tmp_path / "c")
        model.load_state_dict(before)
        ctx.load_embedding(tmp_path / "c", with_state=False)
        assert train(ctx, new_batch(1)) == expected


def test_a_store_that_fails_leaves_model_and_rows_as_they_were(
    make_ctx: MakeCtx,
    model: torch.nn.Module,
    tmp_path: Path,
    new_batch: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "_PAUSES_S", (0.001,) * 4)
    real = LocalFileSystem.cat_file
    away: list[str] = []

    def cat_file(self: Any, path: str, **options: Any) -> bytes:
        if any(name in path for name in away):
            raise OSError(errno.EIO, "the store is away")
        content: bytes = real(self, path, **options)
        return content

    with make_ctx() as ctx:
        train(ctx, new_batch(1))
        ctx.dump_checkpoint(tmp_path / "c")
        train(ctx, new_batch(2))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        ctx.dump_embedding(tmp_path / "before")
        monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file, raising=False)
        for name in ("manifest.json", "dense.pt", "opt.pt", "embeddings-0-0.emb"):
            away[:] = [name]
            for blocking in (True, False):
                with pytest.raises(StorageError, match=f"{name} could not be read: .*the store is away"):
                    ctx.load_checkpoint(tmp_path / "c", blocking=blocking)
        away.clear()
        assert ctx.step == 2
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
        ctx.dump_embedding(tmp_path / "after")
    assert rows_in(tmp_path / "after") == rows_in(tmp_path / "before")


def rows_in(url: Path) -> dict[int, bytes]:
    return {
        int(sign): row.tobytes()
        for block in RowReader(url).blocks()
        for sign, row in zip(block.signs, block.embeddings, strict=True)
    }


@pytest.mark.parametrize("min_norm", [1.0, 1e-4], ids=["all go", "all stay"])
def test_rows_below_their_norm_go_when_a_checkpoint_is_written(
    make_ctx: MakeCtx, tmp_path: Path, new_batch: Any, min_norm: float
) -> None:
    config = EmbeddingConfig(emb_initialization=(0.01, 0.01), min_norm=min_norm)
    with make_ctx(embedding_config=config, embedding_optimizer=SGD(lr=1e-6)) as ctx:
        train(ctx, new_batch(1))
        (size,) = ctx.get_embedding_size()
        ctx.dump_embedding(tmp_path / "c")
        kept = 0 if min_norm == 1.0 else size
        assert size > 0
        assert ctx.get_embedding_size() == [kept]
    embeddings = Source(tmp_path / "c").manifest.embeddings
    assert embeddings is not None
    assert embeddings.num_rows == kept


def test_a_dump_behind_training_is_complete_when_the_context_ends(
    make_ctx: MakeCtx, tmp_path: Path, new_batch: Any
) -> None:
    with make_ctx() as ctx:
        train(ctx, new_batch(1))
        ctx.dump_checkpoint(tmp_path / "c", blocking=False)
    assert files_of(tmp_path / "c") == ["dense.pt", "manifest.json", "opt.pt"]


def test_the_folder_of_a_dump_behind_training_exists_at_once(
    make_ctx: MakeCtx, tmp_path: Path, new_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    create = Location.create

    def create_later(location: Location) -> AbstractContextManager[Any]:
        assert may_write.wait(300)
        return create(location)

    monkeypatch.setattr(Location, "create", create_later)
    with make_ctx() as ctx:
        train(ctx, new_batch(1))
        ctx.dump_checkpoint(tmp_path / "c", blocking=False)
        try:
            (tmp_path / "c" / "mine.txt").write_text("of the script")
        finally:
            may_write.set()
    assert "mine.txt" in files_of(tmp_path / "c")


def test_an_error_behind_training_surfaces_when_the_context_ends(make_ctx: MakeCtx, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    ctx = make_ctx()
    with pytest.raises(StorageError, match="could not be written"), ctx:
        ctx.dump_checkpoint(tmp_path / "file" / "c", blocking=False)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_repeated_dump_may_fail_and_is_tried_again(
    blocking: bool, make_ctx: MakeCtx, tmp_path: Path, new_batch: Any
) -> None:
    place = tmp_path / "file" / "c"
    (tmp_path / "file").write_bytes(b"")
    with make_ctx() as ctx:
        for number in range(3):
            train(ctx, new_batch(number))
            ctx.dump_checkpoint(place, blocking=blocking, on_error="log")
            ctx.wait_for_dump_embedding()
            assert ctx.counters.dumps_failed == min(number + 1, 2)
            if number == 1:  # somebody makes room
                (tmp_path / "file").unlink()
        with pytest.raises(InvalidArgumentError, match="on_error is 'ignore'"):
            ctx.dump_checkpoint(place, on_error="ignore")  # type: ignore[arg-type]
    assert Source(place).manifest.step == 3


def test_state_of_the_script_is_committed_with_the_checkpoint(
    make_ctx: MakeCtx, tmp_path: Path, new_batch: Any
) -> None:
    extra = {"epoch": 3, "best": 0.5, "rng": torch.get_rng_state(), "names": ["a", ("b", None)], 7: b"x"}
    with make_ctx() as ctx:
        train(ctx, new_batch(1))
        ctx.dump_checkpoint(tmp_path / "c", extra=extra)
        with pytest.raises(InvalidTypeError, match="extra cannot be stored safely"):
            ctx.dump_checkpoint(tmp_path / "c", extra={"path": tmp_path})
        loaded = ctx.load_checkpoint(tmp_path / "c")
        assert torch.equal(loaded.pop("rng"), extra.pop("rng"))  # type: ignore[arg-type]
        assert loaded == extra
        file = Source(tmp_path / "c").manifest.dense.files["extra.pt"]  # type: ignore[union-attr]
        path = tmp_path / "c" / file.path
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(CorruptionError, match=r"extra\.pt"):
            ctx.load_checkpoint(tmp_path / "c")
        ctx.dump_checkpoint(tmp_path / "c")
        assert ctx.load_checkpoint(tmp_path / "c") is None


def test_keep_last_uses_the_step_of_the_context(make_ctx: MakeCtx, tmp_path: Path, new_batch: Any) -> None:
    with make_ctx() as ctx:
        for number in range(3):
            train(ctx, new_batch(number))
            ctx.dump_checkpoint(tmp_path, keep_last=2)
        ctx.load_checkpoint(tmp_path)
    assert files_of(tmp_path) == ["latest", "step-000000000002", "step-000000000003"]


@pytest.mark.parametrize("blocking", [True, False])
def test_failed_load_leaves_model_and_rows_as_they_were(
    make_ctx: MakeCtx, model: torch.nn.Module, tmp_path: Path, new_batch: Any, blocking: bool
) -> None:
    with make_ctx() as ctx:
        train(ctx, new_batch(1))
        ctx.dump_checkpoint(tmp_path / "c")
        train(ctx, new_batch(2))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        sizes = ctx.get_embedding_size()
        (path, *_) = (tmp_path / "c").glob("dump-*/embeddings-*.emb")
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CorruptionError, match=r"embeddings-0-\d\.emb has .* truncated"):
            ctx.load_checkpoint(tmp_path / "c", blocking=blocking)
        assert ctx.step == 2
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
        assert ctx.get_embedding_size() == sizes
        other = torch.nn.Linear(3, 3)
        with eval_ctx(model=other) as evaluation, pytest.raises(RuntimeError, match="Missing key"):
            evaluation.load_checkpoint(tmp_path / "c")
        assert ctx.get_embedding_size() == sizes


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


def test_plain_files_are_loaded_with_a_warning(make_ctx: MakeCtx, tmp_path: Path, caplog: Any) -> None:
    with make_ctx() as ctx:
        ctx.dump_torch_state_dict(ctx.model, tmp_path, "dense.pt")
        ctx.dump_torch_state_dict(ctx.dense_optimizer, tmp_path, "opt.pt")
        ctx.load_checkpoint(tmp_path)
        ctx.load_torch_state_dict(ctx.model, tmp_path / "dense.pt")
    assert "has no embeddings: only the dense part is loaded" in caplog.text


def test_bug_8_files_in_memory(make_ctx: MakeCtx, new_batch: Any, tmp_path: Path) -> None:
    with make_ctx() as ctx:
        train(ctx, new_batch(1))
        ctx.dump_checkpoint(f"memory:/{tmp_path}/c")
        ctx.load_checkpoint(f"memory:/{tmp_path}/c")
        with pytest.raises(FailedPreconditionError, match="gs://x"):
            ctx.dump_checkpoint("gs://x/y")


def test_failed_write_leaves_the_old_file_and_nothing_else(make_ctx: MakeCtx, tmp_path: Path) -> None:
    with make_ctx() as ctx:
        ctx.dump_checkpoint(tmp_path / "c")
        before = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()}

        class Broken(torch.nn.Module):
            def state_dict(self, *args: Any, **kwargs: Any) -> Any:
                raise OSError("no state")

        with eval_ctx(model=Broken()) as evaluation, pytest.raises(OSError, match="no state"):
            evaluation.dump_checkpoint(tmp_path / "c")
    assert {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()} == before


def test_bug_20_keys_of_a_ddp_wrapper_are_accepted(model: torch.nn.Module, tmp_path: Path) -> None:
    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, tmp_path / "old.pt")
    other = type(model)()
    dense.load_state(other, (tmp_path / "old.pt").read_bytes(), "old.pt")
    assert torch.equal(other.linear.weight, model.linear.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_bug_20_a_ddp_wrapper_leaves_no_trace_in_what_is_written(
    make_ctx: MakeCtx, model: torch.nn.Module, tmp_path: Path
) -> None:
    option = DDPOption("file", "gloo", sync_file=tmp_path / "sync")
    wrapped, _ = option.convert2distributed_model(model, 1, 0)
    try:
        assert next(iter(wrapped.state_dict())).startswith("module.")
        with make_ctx(model=wrapped) as ctx:
            ctx.dump_checkpoint(tmp_path / "c", with_jit_model=True)
            ctx.dump_torch_state_dict(ctx.model, tmp_path, "alone.pt")
    finally:
        dist.destroy_process_group()
    for path in (tmp_path / "c" / "dense.pt", tmp_path / "alone.pt"):
        written = torch.load(path, weights_only=True)
        assert list(written) == list(model.state_dict())
        assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())
    assert list(torch.jit.load(tmp_path / "c" / "jit_dense.pt").state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("compiled", [False, True], ids=["into plain", "into compiled"])
def test_a_compiled_model_has_the_checkpoint_of_a_plain_one(
    make_ctx: MakeCtx, model: torch.nn.Module, tmp_path: Path, compiled: bool
) -> None:
    """`torch.compile` wraps, and its wrapper's state has other names. No code is generated here."""
    with make_ctx(model=torch.compile(model, backend="eager") if not compiled else model) as ctx:
        ctx.dump_checkpoint(tmp_path / "c")
        state = torch.load(io.BytesIO(Source(tmp_path / "c").dense("dense.pt")), weights_only=True)
    assert list(state) == list(model.state_dict())
    other = type(model)()
    assert not torch.equal(other.linear.weight, model.linear.weight)
    with make_ctx(model=torch.compile(other, backend="eager") if compiled else other) as ctx:
        ctx.load_checkpoint(tmp_path / "c")
    assert torch.equal(other.linear.weight, model.linear.weight)


def test_a_copied_state_is_the_one_that_is_written(model: torch.nn.Module) -> None:
    for wrapped in (model, torch.compile(model, backend="eager")):
        copied, written = (
            torch.load(io.BytesIO(content), weights_only=True)
            for content in (dense.copied_state(wrapped)(), dense.state_bytes(wrapped))
        )
        assert list(copied) == list(written) == list(model.state_dict())
        assert all(torch.equal(copied[name], written[name]) for name in written)


def test_keys_of_wrappers_are_accepted_in_any_order(model: torch.nn.Module) -> None:
    for prefix in ("_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        buffer = io.BytesIO()
        torch.save({f"{prefix}{key}": value for key, value in model.state_dict().items()}, buffer)
        other = type(model)()
        dense.load_state(other, buffer.getvalue(), "old.pt")
        assert torch.equal(other.linear.weight, model.linear.weight)


def test_a_models_own_part_may_be_called_as_wrappers_call_theirs() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 1)

    model, other = Holder(), Holder()
    dense.load_state(other, dense.state_bytes(model), "own.pt")
    assert torch.equal(other.module.weight, model.module.weight)


def test_nothing_but_tensors_is_unpickled(model: torch.nn.Module, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "pwned"),))

    torch.save({"linear.weight": Evil()}, tmp_path / "dense.pt")
    with pytest.raises(CorruptionError, match=r"dense\.pt is no file of tensors"):
        dense.load_state(model, (tmp_path / "dense.pt").read_bytes(), "dense.pt")
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(CorruptionError, match=r"dense\.pt is no file of tensors"):
        dense.load_state(model, b"no torch file", "dense.pt")


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
    assert files_of(tmp_path) == ["dense.pt", "manifest.json", "opt.pt"]


def test_rank_0_writes_for_all(make_ctx: MakeCtx, tmp_path: Path) -> None:
    with make_ctx() as ctx:
        ctx.rank = 1
        ctx.dump_checkpoint(tmp_path)
        ctx.rank = 0
    assert os.listdir(tmp_path) == []
