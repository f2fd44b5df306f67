"""Real stores of this process, and checkpoints of them, as several servers would write and read them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from persia import _native
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.server_job import ServerShare
from persia.checkpoint.service import CheckpointService
from persia.config import SlotConfig, SlotsConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad, Adam, Optimizer
from persia.packets.changes import IncrementalSettings, ServerChanges
from persia.rows.reader import RowReader
from persia.storage.schema import RowSchema

SLOTS = SlotsConfig(slots_config={"user": SlotConfig(dim=4), "item": SlotConfig(dim=8)})
CONFIG = EmbeddingConfig(emb_initialization=(-0.5, 0.5), seed=3)


def make_bags(
    optimizer: Optimizer | None = None, capacity: int = 1_000_000, config: EmbeddingConfig = CONFIG
) -> _native.EmbeddingBags:
    bags = _native.EmbeddingBags(
        slots=SLOTS.native_slots(),
        feature_index_prefix_bit=SLOTS.feature_index_prefix_bit,
        capacity=capacity,
        num_internal_shards=4,
    )
    bags.configure((optimizer or Adagrad(lr=0.1)).train_config(config))
    return bags


def train(bags: _native.EmbeddingBags, num_ids: int = 3000, seed: int = 0, steps: int = 3) -> None:
    """Updates rows of users and items, some of them several times."""
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        ids = generator.integers(0, num_ids, 2 * num_ids, dtype=np.uint64)
        lengths = np.ones((2, num_ids), np.int64)
        pooled, batch = bags.lookup(ids, lengths, train=True)
        bags.update(batch, generator.standard_normal(pooled.shape, dtype=np.float32))


def make_server(index: int, replicas: int, **options: Any) -> _native.ParameterServer:
    server = _native.ParameterServer(
        replica_index=index, replica_size=replicas, capacity=1_000_000, num_internal_shards=4, **options
    )
    server.start("127.0.0.1", 0)
    return server


def services(
    owners: Sequence[Any],
    schema: RowSchema | None = None,
    incremental: IncrementalSettings | None = None,
    **options: Any,
) -> list[CheckpointService]:
    """One for each object with a store, which together are a job's servers."""
    shares = [
        ServerShare(
            store=owner.store,
            index=index,
            replicas=len(owners),
            schema=schema or RowSchema.of(SLOTS),
            num_threads=2,
        )
        for index, owner in enumerate(owners)
    ]
    return [
        CheckpointService(share, ServerChanges.of(share.store, incremental), **options) for share in shares
    ]


def checkpoints_of(*stores: Any, schema: RowSchema | None = None, deadline_s: float = 20.0) -> Checkpoints:
    peers = [LocalPeer(service) for service in services(stores, schema)]
    return Checkpoints(lambda: peers, deadline_s=deadline_s)


def rows_of(url: Any) -> NDArray[np.void]:
    """All rows of a checkpoint, bit for bit, by sign: (sign, age, scalar, embedding and state as bytes)."""
    found = []
    for block in RowReader(url).blocks():
        scalars = block.scalars if len(block.scalars) else np.zeros(len(block.signs), np.uint32)
        values = np.concatenate([block.embeddings, block.state], axis=1)
        rows = zip(block.signs, block.ages, scalars, values, strict=True)
        found += [(int(s), int(a), int(c), v.tobytes()) for s, a, c, v in rows]
    return np.array(sorted(found), dtype=object)


def without_ages(rows: NDArray[Any]) -> NDArray[Any]:
    return rows[:, [0, 2, 3]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of two dumps' worth of training, written by one store."""
    bags = make_bags()
    train(bags)
    checkpoints_of(bags).dump(DumpRequest(tmp_path / "checkpoint", dense={"dense.pt": b"dense"}, step=5))
    return tmp_path / "checkpoint"


@pytest.fixture(params=["adagrad", "adam"])
def optimizer(request: Any) -> Optimizer:
    return Adam(lr=0.01) if request.param == "adam" else Adagrad(lr=0.1)


def sealed(values: dict[str, Any]) -> bytes:
    """A manifest of these values, whole by its checksum, as a program that writes nonsense would make it."""
    body = json.dumps({key: value for key, value in values.items() if key != "checksum"}, indent=1)
    body = body.removesuffix("\n}")
    return f'{body},\n "checksum": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'.encode()


def edit_manifest(checkpoint: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = checkpoint / "manifest.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_bytes(sealed(values))


def shard_files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("dump-*/embeddings-*.emb"))


@contextlib.contextmanager
def unchanged(checkpoints: Checkpoints, tmp_path: Path) -> Any:
    """The rows of the stores behind `checkpoints` are the same after the block."""
    checkpoints.dump(DumpRequest(tmp_path / "before"))
    yield
    checkpoints.dump(DumpRequest(tmp_path / "after"))
    assert np.array_equal(rows_of(tmp_path / "before"), rows_of(tmp_path / "after"))
