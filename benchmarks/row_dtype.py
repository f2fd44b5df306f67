"""`python -m benchmarks.row_dtype`: what rows of 16 bits lose.

*Updates*: rows of ones get many small gradients by SGD; printed is the error of all elements together, as a
share of how far they should have come, and the usual error of one. Rounding to nearest, which the engine does
not offer, is computed by torch.

*Learning*: click probabilities from hidden vectors of users and items, learnt by their dot product with
row-wise Adagrad; printed is the AUC on samples of the same kind that were not trained on, for each seed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.arguments import number, whole
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad
from persia.nn import ClickMetrics, EmbeddingBagCollection

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NUM_ROWS, _DIM = 2000, 32
_NUM_IDS, _BATCH = 20_000, 4096


def _errors(step: Callable[[Tensor], None], read: Callable[[], Tensor], args: argparse.Namespace) -> str:
    """`step(gradient)` makes one update of all rows, with learning rate 1."""
    expected = torch.ones(_NUM_ROWS, _DIM, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.updates):
        gradient = torch.randn(_NUM_ROWS, _DIM, generator=generator) * args.size - args.size
        step(gradient)
        expected -= gradient.double()
    error = read().double() - expected
    bias = float(error.mean() / (expected - 1).mean())
    return f"{bias:+10.4%} {float(error.std()):12.2e}"


def _by_chance(name: str, args: argparse.Namespace) -> str:
    config = EmbeddingConfig(emb_initialization=(1.0, 1.0), weight_bound=1000.0)
    ebc = EmbeddingBagCollection({"a": _DIM}, SGD(lr=1.0), embedding_config=config, row_dtype=name)
    ids, lengths = torch.arange(_NUM_ROWS), torch.ones(1, _NUM_ROWS, dtype=torch.int64)

    def pooled() -> Tensor:
        rows: Tensor = ebc(ids, lengths)
        return rows

    def step(gradient: Tensor) -> None:
        torch.autograd.backward(pooled(), gradient)

    def read() -> Tensor:
        with torch.no_grad():
            return pooled()

    return _errors(step, read, args)


def _to_nearest(dtype: torch.dtype, args: argparse.Namespace) -> str:
    rows = torch.ones(_NUM_ROWS, _DIM, dtype=dtype)

    def step(gradient: Tensor) -> None:
        rows.copy_(rows.float() - gradient)

    return _errors(step, lambda: rows, args)


def _auc(name: str, seed: int, args: argparse.Namespace) -> float:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, _NUM_IDS, 8, generator=generator)
    config = EmbeddingConfig(emb_initialization=(-0.05, 0.05), seed=seed)
    optimizer = Adagrad(lr=0.1, vectorwise_shared=True)
    ebc = EmbeddingBagCollection({"user": 16, "item": 16}, optimizer, embedding_config=config, row_dtype=name)
    lengths = torch.ones(2, _BATCH, dtype=torch.int64)

    def batch() -> tuple[Tensor, Tensor]:
        # Some IDs come far more often than others.
        ids = (torch.rand(2, _BATCH, generator=generator) ** 2 * _NUM_IDS).long()
        logits = (hidden[0, ids[0]] * hidden[1, ids[1]]).sum(1)
        return ids.flatten(), torch.bernoulli(torch.sigmoid(logits), generator=generator)

    def logits(ids: Tensor) -> Tensor:
        pooled: Tensor = ebc(ids, lengths)
        return torch.mul(*pooled.chunk(2, dim=1)).sum(1)

    for _ in range(args.steps):
        ids, clicks = batch()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits(ids), clicks, reduction="sum")
        torch.autograd.backward(loss)
    metrics = ClickMetrics(window=args.judged * _BATCH)
    with torch.no_grad():
        for _ in range(args.judged):
            ids, clicks = batch()
            metrics.update(torch.sigmoid(logits(ids)), clicks)
    return metrics.compute().auc


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=whole(1), default=1000)
    parser.add_argument(
        "--size", type=number(above=0), default=1e-4, help="of an update, beside weights of 1"
    )
    parser.add_argument("--steps", type=whole(1), default=2000, help="of learning")
    parser.add_argument("--judged", type=whole(1), default=50, help="batches that the AUC is of")
    parser.add_argument("--seeds", type=whole(1), default=3)
    args = parser.parse_args()
    print(f"{'rows':22}{'together':>10} {'of one':>12}")
    for name, dtype in _DTYPES.items():
        print(f"{name:22}{_by_chance(name, args)}", flush=True)
        if dtype != torch.float32:
            print(f"{name + ', to nearest':22}{_to_nearest(dtype, args)}", flush=True)
    for name in _DTYPES:
        aucs = [_auc(name, seed, args) for seed in range(args.seeds)]
        shown = ", ".join(f"{auc:.4f}" for auc in aucs)
        print(f"{name:22} AUC {statistics.mean(aucs):.4f} ({shown})", flush=True)


if __name__ == "__main__":
    main()
