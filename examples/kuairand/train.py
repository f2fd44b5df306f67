"""Trains on one week of clicks and is judged on the next.

    KUAIRAND_DIR=DIR python train.py                 everything in this process
    persia-launcher local --nn-worker train.py --data-loader data_loader.py \\
        --embedding-config embedding_config.yml      the same on a cluster

Settings come from the environment (see job_settings.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import clicks
import data_loader
from click_model import ClickModel
from job_settings import EMBEDDING_RATE, Settings
from outcome import Throughput, describe, write_summary
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Adagrad
from persia.env import get_rank, get_world_size
from persia.nn import ClickMetrics
from persia.utils import setup_seed

_TEST_BATCH_SIZE = 4096


class TestClicks(IterableDataset):
    """The week after."""

    def __init__(self, log: clicks.Clicks) -> None:
        super().__init__()
        self._log = log

    def __iter__(self) -> Iterator[PersiaBatch]:
        return (part.to_persia_batch(requires_grad=False) for part in self._log.batches(_TEST_BATCH_SIZE))


def train(ctx: TrainCtx, loader: DataLoader) -> float:
    """One pass; returns samples per second of all ranks, until the last update is applied."""
    throughput = Throughput()
    for batch in loader:
        logits, labels = ctx.forward(batch)
        assert labels is not None, "only inference has none"
        ctx.backward(binary_cross_entropy_with_logits(logits, labels[0]))
        throughput.step(len(labels[0]) * (get_world_size() or 1))
    ctx.wait_for_gradients()
    return throughput.overall()


def predict(model: ClickModel, log: clicks.Clicks) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of `log`, float32 [rows, 1]."""
    logits, labels = [], []
    model.eval()
    with eval_ctx(model=model) as ctx, torch.no_grad():
        for batch in DataLoader(TestClicks(log)):
            output, (clicked,) = ctx.forward(batch)
            logits.append(output)
            labels.append(clicked)
    return torch.cat(logits), torch.cat(labels)


def main() -> None:
    settings = Settings.from_environment()
    setup_seed(settings.seed)
    model = ClickModel()
    with TrainCtx(
        model=model,
        # One dense step averages a batch of every rank: the rate grows with what it averages.
        dense_optimizer=torch.optim.Adam(
            model.parameters(), lr=settings.dense_rate * (get_world_size() or 1)
        ),
        embedding_optimizer=Adagrad(lr=EMBEDDING_RATE),
        mixed_precision=False,
        consistency=settings.consistency,
        slots=settings.slots,
    ) as ctx:
        loader = DataLoader(
            StreamingDataset(loader=data_loader.main),  # without a cluster, a thread of this process
            reproducible=settings.reproducible,
            embedding_staleness=settings.staleness,
            # No more batches than these are looked up ahead, whatever the bound.
            forward_buffer_size=max(10, settings.staleness or 0),
        )
        samples_per_second = train(ctx, loader)
        if get_rank():
            return
        logits, labels = predict(model, clicks.read(settings.data, clicks.TEST, settings.max_rows))
        quality = ClickMetrics(window=len(labels), from_logits=True)
        quality.update(logits, labels)
        print(f"test: {describe(quality.compute())}", flush=True)
        write_summary(
            settings.output,
            test_auc=quality.compute().auc,
            samples_per_second=samples_per_second,
            measured_staleness=ctx.staleness.mean,
            # Equal for runs that are equal to the last bit, in whatever order the batches came.
            predictions_sha256=hashlib.sha256(logits.sort(dim=0).values.numpy().tobytes()).hexdigest(),
            num_embeddings=sum(ctx.get_embedding_size()),
        )


if __name__ == "__main__":
    main()
