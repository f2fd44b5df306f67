"""The names that `from persia import ...` offers: the same objects as in their modules, and loaded late."""

from __future__ import annotations

import subprocess
import sys

import pytest

import persia
from persia import ctx, data, nn
from persia.embedding import EmbeddingConfig
from persia.embedding import data as embedding_data
from persia.embedding import optim as embedding_optim


@pytest.mark.parametrize("name", persia.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(persia, name) is not None


def test_names_are_those_of_their_modules() -> None:
    from persia import DataLoader, EmbeddingBagCollection, PersiaBatch, TrainCtx, eval_ctx, optim

    assert (TrainCtx, eval_ctx) == (ctx.TrainCtx, ctx.eval_ctx)
    assert (DataLoader, EmbeddingBagCollection) == (data.DataLoader, nn.EmbeddingBagCollection)
    assert persia.EmbeddingConfig is EmbeddingConfig
    assert (PersiaBatch, optim) == (embedding_data.PersiaBatch, embedding_optim)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'persia' has no attribute 'TrainContext'"):
        persia.TrainContext  # noqa: B018


@pytest.mark.parametrize(
    ("script", "loaded"),
    [
        ("import persia", []),
        ("from persia import PersiaBatch, IDTypeFeature, DataCtx", ["persia._core"]),
        ("from persia import TrainCtx", ["torch", "persia._core"]),
    ],
)
def test_torch_is_loaded_by_those_who_need_it(script: str, loaded: list[str]) -> None:
    script += "\nimport sys; print(*(name for name in ('torch', 'persia._core') if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == loaded
