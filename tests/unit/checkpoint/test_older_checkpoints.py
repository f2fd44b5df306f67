"""Checkpoints that an older build wrote still load, bit for bit.

`checkpoint_of_0_1` is a checkpoint of commit a0b4bf9: one slot `user` of dim 4, Adagrad, four batches.
The arrays beside it are the rows as that build exported them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from persia.ctx import TrainCtx
from persia.embedding.optim import Adagrad
from persia.rows.export import export
from persia.rows.reader import RowReader

OLD = Path(__file__).parent / "checkpoint_of_0_1"
SLOTS = {"slots_config": {"user": {"dim": 4}}}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.Linear(5, 1)


def assert_same_rows(folder: Path) -> None:
    for name in ("ids", "embeddings", "state"):
        file = f"user.{name}.npy"
        np.testing.assert_array_equal(np.load(folder / file), np.load(OLD / file))


def test_it_is_read_without_a_job(tmp_path: Path) -> None:
    export(RowReader(OLD / "checkpoint"), tmp_path / "rows", kind="numpy", with_state=True)
    assert_same_rows(tmp_path / "rows")


def test_training_continues_from_it(tmp_path: Path) -> None:
    model = Model()
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mixed_precision=False,
        slots=SLOTS,
    ) as ctx:
        ctx.load_checkpoint(OLD / "checkpoint")
        assert ctx.step == 4
        assert sum(ctx.get_embedding_size()) == 19
        ctx.dump_checkpoint(tmp_path / "again")
    old = torch.load(OLD / "checkpoint" / "dense.pt", weights_only=True)
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
    export(RowReader(tmp_path / "again"), tmp_path / "rows", kind="numpy", with_state=True)
    assert_same_rows(tmp_path / "rows")
