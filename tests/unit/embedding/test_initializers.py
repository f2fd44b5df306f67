"""Initial values by name: what the settings mean, seen in the rows of a store."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from persia.config import SlotConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.initializers import (
    Constant,
    Initializer,
    Normal,
    Ones,
    TruncatedNormal,
    Uniform,
    XavierNormal,
    XavierUniform,
    Zeros,
)
from persia.embedding.optim import SGD
from persia.errors import InvalidArgumentError, InvalidTypeError
from persia.nn import EmbeddingBagCollection

NUM_IDS = 4000


def rows(initializer: Initializer, dim: int = 16, *, own: Initializer | None = None) -> torch.Tensor:
    """float32 [NUM_IDS, dim] of a job with `initializer`, or of a slot with its own."""
    ebc = EmbeddingBagCollection(
        {"slot": SlotConfig(dim=dim, initializer=own)},
        SGD(0.1),
        embedding_config=EmbeddingConfig(emb_initialization=initializer, seed=3),
        num_threads=1,
    )
    return ebc(torch.arange(NUM_IDS), torch.ones((1, NUM_IDS), dtype=torch.int64)).detach()


@pytest.mark.parametrize(
    ("initializer", "mean", "std", "lower", "upper"),
    [
        (Uniform(-1, 3), 1, 4 / math.sqrt(12), -1, 3),
        (Normal(0.5, 2), 0.5, 2, -math.inf, math.inf),
        (TruncatedNormal(1, 0.5), 1, 0.5 * 0.8796, 0, 2),
        (TruncatedNormal(0, 1, lower=0, upper=100), math.sqrt(2 / math.pi), 0.6028, 0, 100),
        (XavierUniform(), 0, 0.25, -math.sqrt(3) / 4, math.sqrt(3) / 4),
        (XavierUniform(gain=2), 0, 0.5, -math.sqrt(3) / 2, math.sqrt(3) / 2),
        (XavierNormal(), 0, 0.25, -math.inf, math.inf),
    ],
)
def test_moments_and_bounds(
    initializer: Initializer, mean: float, std: float, lower: float, upper: float
) -> None:
    values = rows(initializer).double()
    error = 5 * std / math.sqrt(values.numel())
    assert float(values.mean()) == pytest.approx(mean, abs=error)
    assert float(values.std()) == pytest.approx(std, abs=error)
    assert lower <= float(values.min())
    assert float(values.max()) <= np.float32(upper)


@pytest.mark.parametrize(("initializer", "value"), [(Zeros(), 0), (Ones(), 1), (Constant(-0.25), -0.25)])
def test_constants(initializer: Initializer, value: float) -> None:
    assert torch.equal(rows(initializer), torch.full((NUM_IDS, 16), value))


def test_xavier_follows_the_dim() -> None:
    assert float(rows(XavierNormal(), dim=64).std()) == pytest.approx(1 / 8, rel=0.02)


def test_a_slot_s_own_gives_the_rows_that_the_job_s_would() -> None:
    assert torch.equal(rows(Zeros(), own=Normal()), rows(Normal()))
    assert not torch.equal(rows(Normal()), rows(Uniform()))


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (Uniform, {"lower": 1.0, "upper": 0.0}, "upper"),
        (Normal, {"std": 0.0}, "std"),
        (Normal, {"mean": math.inf}, "mean"),
        (TruncatedNormal, {"lower": 1.0, "upper": 1.0}, "lower|upper"),
        (TruncatedNormal, {"std": 1.0, "lower": 9.0, "upper": 10.0}, "lower"),
        (Constant, {"value": math.nan}, "lower"),
    ],
)
def test_values_out_of_range_are_refused(
    kind: type[Initializer], settings: dict[str, float], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        kind(**settings)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="std"):
        Normal(std="1")  # type: ignore[arg-type]
