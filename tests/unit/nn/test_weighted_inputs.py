"""Weights of values, and a KeyedJaggedTensor, as inputs of an EmbeddingBagCollection."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from persia.errors import InvalidArgumentError, InvalidTypeError

from .test_embedding_bag_collection import LENGTHS, VALUES, from_zero, read


def test_weights_multiply_rows_and_their_gradients() -> None:
    ebc = from_zero()
    ebc(VALUES, LENGTHS, torch.tensor([1.0, 2.0, 0.5])).sum().backward()
    assert read(ebc) == [[-1, -1, 0, 0, 0], [-2, -2, -0.5, -0.5, -0.5]]
    weighted = ebc(VALUES, LENGTHS, torch.tensor([-1.0, 1.0, 2.0]))
    assert weighted.tolist() == [[1, 1, 0, 0, 0], [-2, -2, -1, -1, -1]]


@pytest.mark.parametrize(
    ("weights", "error", "named"),
    [
        (torch.ones(3, dtype=torch.float64), InvalidTypeError, "per_sample_weights is torch.float64"),
        ([1.0, 1.0, 1.0], InvalidTypeError, "per_sample_weights is a list"),
        (torch.ones(3, requires_grad=True), InvalidArgumentError, r"per_sample_weights requires a gradient"),
        (torch.ones(2), InvalidArgumentError, "weights has 2 elements for 3 values"),
        (torch.tensor([1.0, float("nan"), 1.0]), InvalidArgumentError, "a weight is NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit(weights: Any, error: type[Exception], named: str) -> None:
    ebc = from_zero()
    with pytest.raises(error, match=named):
        ebc(VALUES, LENGTHS, weights)
    assert ebc.stats().num_rows == 0


# --- KeyedJaggedTensor ---


@pytest.fixture
def keyed_jagged_tensor() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of its import
        torchrec = pytest.importorskip("torchrec", reason="torchrec is not installed", exc_type=ImportError)
    return torchrec.KeyedJaggedTensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_keyed_jagged_tensor(keyed_jagged_tensor: Any, dtype: torch.dtype) -> None:
    ebc = from_zero()
    jagged = keyed_jagged_tensor(keys=["a", "b"], values=VALUES, lengths=LENGTHS.flatten().to(dtype))
    ebc(jagged).values().sum().backward()
    assert read(ebc) == [[-1, -1, 0, 0, 0], [-1] * 5]
    by_offsets = keyed_jagged_tensor(keys=["a", "b"], values=VALUES, offsets=torch.tensor([0, 1, 2, 2, 3]))
    assert torch.equal(ebc(by_offsets).values(), ebc(VALUES, LENGTHS))


def test_a_keyed_jagged_tensor_gives_what_torchrec_gives(keyed_jagged_tensor: Any) -> None:
    import torchrec

    tables = [
        torchrec.EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=10, feature_names=[name])
        for name, dim in (("a", 2), ("b", 3))
    ]
    theirs = torchrec.EmbeddingBagCollection(tables=tables)
    ours = from_zero()
    for table in tables:
        weight = theirs.embedding_bags[table.name].weight.detach()
        ours.set_embeddings(table.name, torch.arange(10), weight.clone())
    jagged = keyed_jagged_tensor(keys=["a", "b"], values=VALUES, lengths=LENGTHS.flatten())
    expected, got = theirs(jagged), ours(jagged)
    assert type(got) is type(expected)
    assert (got.keys(), got.length_per_key()) == (expected.keys(), expected.length_per_key())
    assert torch.equal(got.values(), expected.values())
    assert torch.equal(got["b"], expected["b"])
    # A gradient goes the same way, too: by SGD each row loses what torchrec's gradient says.
    expected.values().square().sum().backward()
    got.values().square().sum().backward()
    with torch.no_grad():
        rows = ours(torch.arange(10).repeat(2), torch.ones(2, 10, dtype=torch.int64)).split([2, 3], dim=1)
    for table, row in zip(tables, rows, strict=True):
        weight = theirs.embedding_bags[table.name].weight
        assert torch.allclose(row, weight.detach() - weight.grad)


def test_keyed_jagged_tensors_that_do_not_fit(keyed_jagged_tensor: Any) -> None:
    ebc, lengths = from_zero(), LENGTHS.flatten()
    with pytest.raises(InvalidArgumentError, match=r"\['b', 'a'\].*order: \['a', 'b'\]"):
        ebc(keyed_jagged_tensor(keys=["b", "a"], values=VALUES, lengths=lengths))
    weighted = keyed_jagged_tensor(keys=["a", "b"], values=VALUES, lengths=lengths, weights=torch.ones(3))
    with pytest.raises(InvalidArgumentError, match="per_sample_weights.*beside a KeyedJaggedTensor"):
        ebc(weighted, per_sample_weights=torch.ones(3))
    with pytest.raises(InvalidArgumentError, match="another batch size"):
        ebc(
            keyed_jagged_tensor(
                keys=["a", "b"],
                values=VALUES,
                lengths=torch.ones(3, dtype=torch.int64),
                stride_per_key_per_rank=[[2], [1]],
            )
        )
    jagged = keyed_jagged_tensor(keys=["a", "b"], values=VALUES, lengths=lengths)
    with pytest.raises(InvalidArgumentError, match="beside a KeyedJaggedTensor"):
        ebc(jagged, LENGTHS)
    assert ebc.stats().num_rows == 0
