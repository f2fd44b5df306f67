"""One DLRM, three ways to train it: persia embedded, torchrec with fbgemm's fused tables, and plain torch.

`python -m benchmarks.dlrm` makes clicks up on Criteo's cardinalities (33.8 million rows), with a planted
model whose AUC is the best that there can be. All three train `persia.models.DLRM` with Adagrad for both
parts, on the same batches in the same order, on the same cores; batches are in memory before the clock
starts. Seeds change the weights. Each training is a process of its own, and the systems take turns.
Samples a second of processor time are comparable on a machine that does other work, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from persia import DataLoader, TrainCtx
from persia import optim as persia_optim
from persia.data import IterableDataset, SyntheticClicks
from persia.embedding import EmbeddingConfig
from persia.embedding.data import PersiaBatch
from persia.models import DLRM
from persia.nn import ClickMetrics
from persia.train import Trainer
from persia.utils import setup_seed

_SYSTEMS = ("persia", "torchrec", "torch")
_WARM_STEPS = 20
_VALID_BATCHES, _VALID_SIZE = 16, 8192
_BOUND = 0.05  # initial embeddings are uniform within it


class Job:
    """What every system is given."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.dim, self.lr, self.seed = arguments.dim, arguments.lr, arguments.seed
        data: dict[str, Any] = {"num_known": 8, "strength": 2.0, "planted_seed": 1}
        num_batches = _WARM_STEPS + arguments.steps
        self.train = SyntheticClicks(num_batches=num_batches, batch_size=arguments.batch_size, seed=2, **data)
        self.valid = SyntheticClicks(num_batches=_VALID_BATCHES, batch_size=_VALID_SIZE, seed=3, **data)
        self.staleness: int = arguments.staleness
        setup_seed(self.seed)
        self.model = DLRM(dim=self.dim, bottom_mlp_sizes=[256, 64, self.dim], top_mlp_sizes=[256, 128, 1])
        self.dense_optimizer = torch.optim.Adagrad(self.model.parameters(), lr=self.lr)

    def batches(self, clicks: SyntheticClicks) -> list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
        """Dense features, IDs of each slot, labels."""
        made = []
        for index in clicks.read():
            numerical, categorical, labels, _ = clicks.columns(index)
            ids = [torch.from_numpy(slot) for slot in categorical]
            made.append((torch.from_numpy(numerical), ids, torch.from_numpy(labels).reshape(-1, 1)))
        return made


class _Batches(IterableDataset):
    def __init__(self, batches: list[PersiaBatch]) -> None:
        super().__init__()
        self._batches = batches

    def __iter__(self) -> Iterator[PersiaBatch]:
        return iter(self._batches)


class Clock:
    """The time since it was made."""

    def __init__(self) -> None:
        self._begin = time.monotonic(), time.process_time()

    def rates(self, num_samples: int) -> dict[str, float]:
        """Samples a second, and a second of processor time."""
        seconds, busy = time.monotonic() - self._begin[0], time.process_time() - self._begin[1]
        return {"rate": num_samples / seconds, "busy_rate": num_samples / busy}


def persia(job: Job) -> dict[str, float]:
    """Samples a second, those a second of processor time, and AUC."""
    made = [job.train.make(rows, requires_grad=True) for rows in job.train.read()]
    sparse = persia_optim.Adagrad(lr=job.lr, initial_accumulator_value=0.0)
    slots = job.train.spec(".").slots(job.dim)
    config = EmbeddingConfig(emb_initialization=(-_BOUND, _BOUND))
    with TrainCtx(sparse, job.dense_optimizer, model=job.model, slots=slots, embedding_config=config) as ctx:
        # A loader looks batches up ahead: one of its own, so that the clock sees all its lookups.
        for batches in (made[:_WARM_STEPS], made[_WARM_STEPS:]):
            clock = Clock()
            for batch in DataLoader(_Batches(batches), embedding_staleness=job.staleness):
                output, labels = ctx.forward(batch)
                assert labels is not None, "only inference has none"
                ctx.backward(nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
            ctx.wait_for_gradients()
        rates = clock.rates(job.train.batch_size * (len(made) - _WARM_STEPS))
        return {**rates, "auc": Trainer(job.train, job.valid).evaluate(ctx, job.valid).auc}


def torchrec(job: Job) -> dict[str, float]:
    """As `persia`; IDs are row numbers, in keyed jagged tensors that are made beforehand."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [f"cat_{index}" for index in range(len(job.train.cardinalities))]
    tables = FusedEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"table_{name}",
                embedding_dim=job.dim,
                num_embeddings=size,
                feature_names=[name],
                weight_init_min=-_BOUND,
                weight_init_max=_BOUND,
            )
            for name, size in zip(names, job.train.cardinalities, strict=True)
        ],
        optimizer_type=torch.optim.Adagrad,
        optimizer_kwargs={"lr": job.lr},
        device=torch.device("cpu"),
    )

    def prepare(ids: list[torch.Tensor]) -> Any:
        lengths = torch.ones(len(ids) * len(ids[0]), dtype=torch.int64)
        keyed = KeyedJaggedTensor(keys=names, values=torch.cat(ids), lengths=lengths)
        keyed.offsets()  # computed once and kept
        return keyed

    def embed(ids: Any) -> list[torch.Tensor]:
        return list(tables(ids).values().split(job.dim, dim=1))

    return _train(job, prepare, embed, lambda: None)


def plain(job: Job) -> dict[str, float]:
    """As `persia`, with one sparse `nn.EmbeddingBag` for each slot; IDs are row numbers."""
    bags = []
    for size in job.train.cardinalities:
        weight = torch.empty(size, job.dim).uniform_(-_BOUND, _BOUND)
        bags.append(nn.EmbeddingBag(size, job.dim, mode="sum", sparse=True, _weight=weight))
    optimizer = torch.optim.Adagrad(nn.ModuleList(bags).parameters(), lr=job.lr)
    offsets = {size: torch.arange(size) for size in (job.train.batch_size, _VALID_SIZE)}

    def embed(ids: list[torch.Tensor]) -> list[torch.Tensor]:
        return [bag(slot, offsets[len(slot)]) for bag, slot in zip(bags, ids, strict=True)]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _train(job, lambda ids: ids, embed, update)


def _train(
    job: Job,
    prepare: Callable[[list[torch.Tensor]], Any],
    embed: Callable[[Any], list[torch.Tensor]],
    update: Callable[[], None],
) -> dict[str, float]:
    made = [(dense, prepare(ids), labels) for dense, ids, labels in job.batches(job.train)]
    clock = Clock()
    for step, (dense, ids, labels) in enumerate(made):
        if step == _WARM_STEPS:
            clock = Clock()
        output = job.model([dense], embed(ids))
        loss = nn.functional.binary_cross_entropy_with_logits(output, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        job.dense_optimizer.step()
        job.dense_optimizer.zero_grad(set_to_none=True)
        update()
    rates = clock.rates(job.train.batch_size * (len(made) - _WARM_STEPS))
    metrics = ClickMetrics(_VALID_BATCHES * _VALID_SIZE, from_logits=True)
    job.model.eval()
    with torch.no_grad():
        for dense, ids, labels in job.batches(job.valid):
            metrics.update(job.model([dense], embed(prepare(ids)))[:, 0], labels[:, 0])
    return {**rates, "auc": metrics.compute().auc}


def main() -> None:
    """Prints samples/s and AUC of each system."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--staleness", type=int, default=2, help="persia's batches in flight")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=len(cores), help="of torch, on as many cores")
    parser.add_argument("--system", choices=_SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        os.sched_setaffinity(0, cores[: arguments.threads])
        torch.set_num_threads(arguments.threads)
        train = {"persia": persia, "torchrec": torchrec, "torch": plain}[arguments.system]
        print(json.dumps(train(Job(arguments))))
        return
    results: dict[str, list[dict[str, float]]] = {system: [] for system in _SYSTEMS}
    for seed in range(arguments.seeds):
        turn = seed % len(_SYSTEMS)
        for system in _SYSTEMS[turn:] + _SYSTEMS[:turn]:
            command = [sys.executable, "-m", "benchmarks.dlrm", *sys.argv[1:]]
            command += ["--system", system, "--seed", str(seed)]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
            )
            results[system].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"seed {seed}, {system}: {results[system][-1]}", file=sys.stderr)
    arguments.seed = 0
    _show(results, Job(arguments).valid.best_auc())


def _show(results: dict[str, list[dict[str, float]]], best: float) -> None:
    table = Table("system", "samples/s, median", "least to most", "persia's, by turns")
    for column in ("samples/s of a core", "persia's, by turns", "AUC, mean", "spread"):
        table.add_column(column)
    for system, runs in results.items():
        cells = []
        for key in ("rate", "busy_rate"):
            rates = [run[key] for run in runs]
            ratios = [ours[key] / run[key] for ours, run in zip(results["persia"], runs, strict=True)]
            cells.append(f"{statistics.median(rates):,.0f}")
            if key == "rate":
                cells.append(f"{min(rates):,.0f} to {max(rates):,.0f}")
            cells.append(f"{statistics.median(ratios):.2f}")
        aucs = [run["auc"] for run in runs]
        table.add_row(system, *cells, f"{np.mean(aucs):.5f}", f"{np.ptp(aucs):.5f}")
    console = Console(width=110)
    console.print(table)
    console.print(f"AUC of the planted model: {best:.5f}", highlight=False)


if __name__ == "__main__":
    main()
