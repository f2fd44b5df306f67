"""Embedded jobs whose rows are in a pool: results as in memory, and checkpoints that stay in place."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia import pmem
from persia.config import StorageConfig
from persia.ctx import DataCtx, TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.errors import InvalidArgumentError, NotFoundError, UnavailableError
from persia.tiers.server_tier import ServerTier

from .conftest import Model

SLOTS = {"feature_index_prefix_bit": 8, "slots_config": {"a": {"dim": 4}, "b": {"dim": 4}}}
KINDS = [
    "dram",
    "file",
    pytest.param("pmem", marks=pytest.mark.skipif(not pmem.HAS_PMEM, reason="built without libpmem")),
]


def config_of(kind: str, path: Path, **cache: int) -> dict[str, Any]:
    storage = {} if kind == "dram" else {"kind": kind, "path": str(path), **(cache or {"cache_rows": 4})}
    server = {"capacity": 50_000, "num_hashmap_internal_shards": 2, "storage": storage}
    return {"embedding_parameter_server_config": server}


@pytest.fixture
def enter(make_ctx: Callable[..., TrainCtx], tmp_path: Path) -> Callable[..., TrainCtx]:
    """A context of a model of its own over storage of that kind, in `tmp_path`."""

    def enter(kind: str, **cache: int) -> TrainCtx:
        gc.collect()  # the pool is free once nothing holds its context any more
        torch.manual_seed(3)
        model = Model()
        return make_ctx(
            backend=None,
            model=model,
            embedding_optimizer=Adagrad(lr=0.1),
            dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            slots=SLOTS,
            global_config=config_of(kind, tmp_path, **cache),
        )

    return enter


def train(ctx: TrainCtx, new_batch: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        output, _ = ctx.forward(ctx.get_embedding_from_data(new_batch(number % 7)))
        loss = (output - 1).square().mean()
        ctx.backward(loss)
        ctx.wait_for_gradients()
        losses.append(float(loss.item()))
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_any_kind_as_in_memory(
    kind: str, enter: Callable[..., TrainCtx], tmp_path: Path, new_batch: Any
) -> None:
    in_place = kind != "dram"
    with enter("dram") as ctx:
        expected = train(ctx, new_batch, range(30))
    with enter(kind) as ctx:
        assert train(ctx, new_batch, range(20)) == expected[:20]
        ctx.dump_checkpoint(tmp_path / "c", blocking=False, in_place=in_place)
        assert train(ctx, new_batch, range(20, 25)) == expected[20:25]
        ctx.wait_for_dump_embedding()
    del ctx
    with enter(kind) as ctx:
        ctx.load_checkpoint(tmp_path / "c")
        assert ctx.step == 20
        assert train(ctx, new_batch, range(20, 30)) == expected[20:]
        ctx.dump_checkpoint(tmp_path / "files")
    del ctx
    # Out of the pool, into memory.
    with enter("dram") as ctx:
        ctx.load_checkpoint(tmp_path / "files")
        assert ctx.step == 30


def test_rows_of_batches_that_wait_are_brought_into_memory_ahead(
    enter: Callable[[str], TrainCtx], new_batch: Any
) -> None:
    def send() -> None:
        with DataCtx() as data:
            for number in range(80):
                data.send_data(new_batch(number % 20))

    with enter("file") as ctx:
        for batch in DataLoader(StreamingDataset(loader=send), embedding_staleness=1):
            output, _ = ctx.forward(batch)
            ctx.backward((output - 1).square().mean() / 1000)  # with more, the model diverges
        store = ctx.runtime.backend.local_store
        assert store is not None
        stats = store.tier_stats()
    assert stats is not None
    assert stats["num_prefetched"] > 0, stats


def test_rows_in_memory_cannot_stay_in_place(
    enter: Callable[..., TrainCtx], tmp_path: Path, new_batch: Any
) -> None:
    with enter("dram") as ctx:
        train(ctx, new_batch, range(1))
        with pytest.raises(InvalidArgumentError, match="the rows of this server are in memory alone"):
            ctx.dump_embedding(tmp_path / "c", in_place=True)


def test_a_pool_has_one_context(
    enter: Callable[..., TrainCtx], make_ctx: Callable[..., TrainCtx], tmp_path: Path
) -> None:
    storage = StorageConfig(kind="file", path=str(tmp_path))
    pool = ServerTier(storage, index=0, replicas=1, schema=None, num_threads=1)
    with pytest.raises(UnavailableError, match="server-0 is in use by another process"):
        enter("file")
    pool.close()
    config = config_of("file", tmp_path / "missing")
    with pytest.raises(NotFoundError, match=r"storage\.path=.* is no directory"):
        make_ctx(backend=None, slots=SLOTS, global_config=config)


def test_a_cache_of_bytes_holds_the_rows_that_fit(enter: Callable[..., TrainCtx]) -> None:
    with enter("file", cache_bytes=3 << 20) as ctx:
        ids = np.arange(20_000, dtype=np.uint64)
        features = [IDTypeFeatureWithSingleID(name, ids) for name in "ab"]
        labels = [Label(np.ones((20_000, 1), np.float32))]
        ctx.get_embedding_from_data(PersiaBatch(features, labels=labels, requires_grad=True))
        store = ctx.runtime.backend.local_store
        assert store is not None
        stats = store.tier_stats()
        assert stats is not None
        # Beside 31 to 40 bytes for each row: 64 for one in memory, 4 numbers, 4 of state, 4 of the
        # cache, up to whole cache lines.
        assert stats["num_rows"] == 40_000
        assert 15_000 <= stats["num_hot"] <= 30_000
