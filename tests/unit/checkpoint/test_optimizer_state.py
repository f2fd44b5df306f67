"""Rows without the optimizer's state: smaller, served as they are, trained on only when that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia.checkpoint.checkpoints import DumpRequest, Source
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.errors import CorruptionError, FailedPreconditionError, PersiaError
from persia.rows.reader import RowReader

from .conftest import (
    CONFIG,
    checkpoints_of,
    edit_manifest,
    make_bags,
    make_server,
    rows_of,
    train,
    unchanged,
    without_ages,
)


def config_of(optimizer: Optimizer, config: EmbeddingConfig = CONFIG) -> bytes:
    return optimizer.train_config(config).encode()


def embeddings_of(url: Any) -> dict[int, bytes]:
    return {
        int(sign): row.tobytes()
        for block in RowReader(url).blocks()
        for sign, row in zip(block.signs, block.embeddings, strict=True)
    }


@pytest.fixture
def trained(tmp_path: Path, optimizer: Optimizer) -> Path:
    """Checkpoints "whole" and "bare" of the same rows."""
    bags = make_bags(optimizer)
    train(bags)
    checkpoints = checkpoints_of(bags)
    checkpoints.dump(DumpRequest(tmp_path / "whole"))
    checkpoints.dump(DumpRequest(tmp_path / "bare", with_state=False))
    return tmp_path


@pytest.mark.parametrize("num_servers", [1, 3])
def test_they_are_smaller_and_trained_on_only_when_asked(
    trained: Path, optimizer: Optimizer, num_servers: int
) -> None:
    whole, bare = Source(trained / "whole").manifest.embeddings, Source(trained / "bare").manifest.embeddings
    assert whole is not None
    assert bare is not None
    assert (whole.has_state, bare.has_state) == (True, False)
    assert bare.num_bytes < 0.9 * whole.num_bytes, "most of so few rows is the index"
    assert embeddings_of(trained / "bare") == embeddings_of(trained / "whole")
    assert all(block.state.shape[1] == 0 for block in RowReader(trained / "bare").blocks())

    job = checkpoints_of(*(make_server(index, num_servers) for index in range(num_servers)))
    job.load(Source(trained / "whole"))
    with (
        unchanged(job, trained),
        pytest.raises(FailedPreconditionError, match=r"bare was dumped without .*with_state=False"),
    ):
        job.load(Source(trained / "bare"), train_config=config_of(optimizer))
    job.load(Source(trained / "bare"), train_config=config_of(optimizer), fresh_state=True)
    job.dump(DumpRequest(trained / "from bare"))
    job.load(Source(trained / "whole"), train_config=config_of(optimizer), fresh_state=True)
    job.dump(DumpRequest(trained / "from whole"))
    assert np.array_equal(
        without_ages(rows_of(trained / "from bare")), without_ages(rows_of(trained / "from whole"))
    )
    assert embeddings_of(trained / "from bare") == embeddings_of(trained / "whole")
    blocks = list(RowReader(trained / "from bare").blocks())
    state = np.concatenate([block.state.ravel() for block in blocks])
    assert len(state) == len(np.concatenate([block.embeddings.ravel() for block in blocks])) * (
        2 if isinstance(optimizer, Adam) else 1
    )
    assert np.unique(state).tolist() == [np.float32(getattr(optimizer, "initial_accumulator_value", 0.0))]
    assert not any(block.scalars.any() for block in blocks), "no steps so far"


def test_they_are_served(trained: Path) -> None:
    served = make_bags()
    checkpoints_of(served).load(Source(trained / "bare"), with_state=False)
    checkpoints_of(served).dump(DumpRequest(trained / "served"))
    assert embeddings_of(trained / "served") == embeddings_of(trained / "whole")


def test_rows_go_on_with_another_optimizer(trained: Path) -> None:
    for other in (SGD(lr=0.1, momentum=0.9), Adagrad(lr=0.1, vectorwise_shared=True), Adam(lr=0.1)):
        bags = make_bags(other)
        checkpoints_of(bags).load(Source(trained / "whole"), train_config=config_of(other), fresh_state=True)
        train(bags, seed=6)
        checkpoints_of(bags).dump(DumpRequest(trained / "other"))
        assert len(rows_of(trained / "other")) >= len(rows_of(trained / "whole"))


def test_a_manifest_that_promises_a_state_that_is_not_there_is_refused(
    trained: Path, optimizer: Optimizer
) -> None:
    edit_manifest(trained / "bare", lambda values: values["embeddings"].update(has_state=True))
    with pytest.raises(PersiaError, match=r"embeddings-0-\d\.emb, bytes .*state of another optimizer"):
        checkpoints_of(make_bags(optimizer)).load(Source(trained / "bare"), train_config=config_of(optimizer))
    edit_manifest(trained / "bare", lambda values: values["embeddings"].update(has_state="yes"))
    with pytest.raises(CorruptionError, match="has_state='yes' must be a valid boolean"):
        Source(trained / "bare")
