"""Packets of changes through the native module: a collection in this process follows another one."""

from __future__ import annotations

import pytest
import torch

from persia import _native
from persia.embedding.optim import Adagrad
from persia.errors import CorruptionError, FailedPreconditionError, ResourceExhaustedError
from persia.nn import EmbeddingBagCollection

HEAD_BYTES = 256


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection({"a": 4}, Adagrad(lr=0.1), num_threads=1)


def train(ebc: EmbeddingBagCollection, ids: range, scale: float = 1.0) -> None:
    values = torch.arange(ids.start, ids.stop)
    pooled = ebc(values, torch.ones(1, len(ids), dtype=torch.int64))
    (pooled.sum() * scale).backward()


def take(ebc: EmbeddingBagCollection, num_parts: int = 2) -> list[bytes]:
    changes = ebc._bags.store.take_changes(num_parts)
    files = []
    for index in range(num_parts):
        pieces = []
        while piece := changes.part(index).read(1000):
            pieces.append(piece)
        files.append(b"".join(pieces))
    changes.commit()
    changes.close()
    return files


def blocks_of(file: bytes) -> memoryview:
    begin = _native.parse_checkpoint_header(file[:HEAD_BYTES])["header_bytes"]
    end, _ = _native.parse_checkpoint_trailer(file[-_native.CHECKPOINT_TRAILER_BYTES :])
    assert isinstance(begin, int)
    return memoryview(bytearray(file))[begin:end]


def apply(ebc: EmbeddingBagCollection, files: list[bytes]) -> int:
    header = _native.parse_checkpoint_header(files[0][:HEAD_BYTES])
    assert header["is_delta"] == 1
    config = header["train_config"]
    assert isinstance(config, _native.TrainConfig)
    loader = ebc._bags.store.begin_apply(config, is_from_nothing=bool(header["is_from_nothing"]))
    for file in files:
        loader.prepare(blocks_of(file))
    loader.apply()
    loader.commit()
    return loader.num_rows


def rows_of(ebc: EmbeddingBagCollection) -> torch.Tensor:
    ebc.eval()
    with torch.no_grad():
        rows = ebc(torch.arange(300), torch.ones(1, 300, dtype=torch.int64)).clone()
    ebc.train()
    return rows


def test_a_follower_is_equal_after_every_packet() -> None:
    trainer, follower = collection(), collection()
    trainer._bags.store.track_changes(1000)
    for step in range(5):
        train(trainer, range(40 * step, 40 * step + 100), 0.5)
        status = trainer._bags.store.change_status()
        assert status == {"max_rows": 1000, "num_rows": 100, "is_due": False, "has_overflowed": False}
        assert apply(follower, take(trainer)) == 100
        assert torch.equal(rows_of(follower), rows_of(trainer))
    trainer._bags.clear()
    train(trainer, range(250, 260))
    apply(follower, take(trainer))
    assert torch.equal(rows_of(follower), rows_of(trainer))
    assert follower.stats().num_rows == 10


def test_what_was_not_committed_comes_again() -> None:
    trainer = collection()
    trainer._bags.store.track_changes(1000)
    train(trainer, range(50))
    trainer._bags.store.take_changes().close()
    assert trainer._bags.store.change_status()["num_rows"] == 50
    changes = trainer._bags.store.take_changes()
    with pytest.raises(FailedPreconditionError, match="read to the end"):
        changes.commit()


def test_errors() -> None:
    trainer, follower = collection(), collection()
    with pytest.raises(FailedPreconditionError, match="not tracked"):
        trainer._bags.store.take_changes()
    trainer._bags.store.track_changes(20)
    train(trainer, range(21))
    with pytest.raises(ResourceExhaustedError, match="full snapshot"):
        trainer._bags.store.take_changes()
    train(trainer, range(10))
    (file,) = take(trainer, num_parts=1)
    config = _native.parse_checkpoint_header(file[:HEAD_BYTES])["train_config"]
    assert isinstance(config, _native.TrainConfig)
    loader = follower._bags.store.begin_apply(config)
    damaged = bytearray(blocks_of(file))
    damaged[-100] ^= 1
    with pytest.raises(CorruptionError):
        loader.prepare(damaged)
    assert loader.prepare(blocks_of(file)) == 10
    assert follower.stats().num_rows == 0
    assert loader.apply() == 10
