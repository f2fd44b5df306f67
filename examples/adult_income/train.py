"""The NN worker: hybrid training over the stream of the data loaders, test AUC, a checkpoint.

    python train.py                  everything in this process
    persia-launcher nn-worker        one rank of a cluster, beside its servers and data loaders

Settings come from the environment (see settings.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing

import torch
from torch import nn

import data_loader
from batches import to_persia_batch
from dataset import DatasetInfo, load_info, load_split
from evaluate import evaluate
from history import HistoryWriter
from model import DNN
from monitor import Monitor
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Adagrad
from persia.env import get_local_rank, get_nats_url, get_rank, get_world_size
from persia.nn import ClickMetrics, ClickQuality
from persia.observability import report
from persia.utils import setup_seed
from prepare_data import ensure_prepared
from settings import Settings


class PreparedDataset(IterableDataset):
    """This rank's batches, made before training begins: no step waits for a data loader.

    All ranks have the same number, as each step is a collective of all; the last batches that do not go round
    are left out.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        batches = load_split(settings.data, "train").training_batches(settings.recipe)
        rank, world_size = get_rank() or 0, get_world_size() or 1
        mine = batches[rank : len(batches) // world_size * world_size : world_size]
        self._batches = [to_persia_batch(batch, requires_grad=True) for batch in mine]

    def __iter__(self) -> Iterator[PersiaBatch]:
        return iter(self._batches)


def training_data(settings: Settings) -> PreparedDataset | StreamingDataset:
    """What the data loaders send, unless the settings have the batches prepared here."""
    if settings.prepared_batches:
        return PreparedDataset(settings)
    # Without a cluster, the data loader is a thread of this process.
    return StreamingDataset(buffer_size=10, loader=data_loader.main)


def train(
    ctx: TrainCtx, loader: DataLoader, window: int, after_step: Callable[[int, float], None]
) -> ClickQuality:
    """Over the whole stream; `after_step` gets the step, counted from 1, and its loss.

    Returns the metrics of the last `window` training samples, predicted before the model learned from them.
    """
    loss_function = nn.BCELoss()
    metrics = ClickMetrics(window=window)
    for step, batch in enumerate(loader, start=1):
        output, labels = ctx.forward(batch)
        assert labels is not None, "only inference has none"
        metrics.update(output, labels[0])
        loss = loss_function(output, labels[0])
        ctx.backward(loss)
        after_step(step, loss.item())
    return metrics.compute()


def report_progress(**values: float | str) -> None:
    """Logs what `kubectl get persiajobs` shows: the operator reads it there (docs/kubernetes.md).

    Numbers also go to `persia-launcher status` and Prometheus (docs/operations.md).
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ:  # every pod has it
        print("persia-progress", json.dumps(values), flush=True)
    report(**{name: value for name, value in values.items() if not isinstance(value, str)})


class Observer:
    """What rank 0 does beside training: progress, history, and the evaluations on the way."""

    def __init__(self, ctx: TrainCtx, model: DNN, settings: Settings, history: HistoryWriter) -> None:
        world_size = get_world_size() or 1
        num_batches = len(load_split(settings.data, "train").training_batches(settings.recipe))
        left_out = num_batches % world_size if settings.prepared_batches else 0
        self._num_steps = -(-(num_batches - left_out) // world_size)
        self._ctx = ctx
        self._model = model
        self._num_evaluations = settings.num_evaluations
        self._test_split = load_split(settings.data, "test")
        self.monitor = Monitor(self._num_steps, settings.recipe.batch_size * world_size, history)

    def after_step(self, step: int, loss: float) -> None:
        self.monitor.step(step, loss, self._ctx.staleness.in_flight)
        interval = max(1, self._num_steps // self._num_evaluations)
        if step % interval == 0 and step + interval <= self._num_steps:
            self.evaluate(step)

    def evaluate(self, step: int | None = None) -> float:
        """Test AUC after that step, by default the last; the throughput's clock stands still meanwhile."""
        with self.monitor.throughput.paused():
            test_auc = evaluate(self._model, self._test_split, self._ctx.device_id)
        step = self._num_steps if step is None else step
        self.monitor.evaluated(step, test_auc)
        report_progress(step=step, auc=test_auc, samplesPerSecond=self.monitor.throughput.overall())
        return test_auc


def save(ctx: TrainCtx, settings: Settings, info: DatasetInfo, observer: Observer) -> None:
    """Final evaluation, checkpoint, and last the summary: it says that all is there."""
    test_auc = observer.evaluate()
    checkpoint = settings.output / "checkpoint"
    ctx.dump_checkpoint(str(checkpoint), with_jit_model=True)
    report_progress(lastCheckpoint=str(checkpoint))
    summary = {
        "dataset": info.dataset,
        "test_auc": test_auc,
        "samples_per_second": observer.monitor.throughput.overall(),
        "max_staleness": observer.monitor.max_staleness,
        "measured_staleness": ctx.staleness.mean,
        "num_embeddings": sum(ctx.get_embedding_size()),
        "seed": settings.seed,
        "reproducible": settings.reproducible,
        "embedding_staleness": settings.embedding_staleness,
        "paths": {"history": str(settings.output / "history.jsonl"), "checkpoint": str(checkpoint)},
    }
    print(
        f"test AUC {test_auc:.7f}, {summary['samples_per_second']:,.0f} samples/s, "
        f"at most {summary['max_staleness']} batches in flight, {summary['num_embeddings']} embeddings; "
        f"the checkpoint is in {checkpoint}",
        flush=True,
    )
    aside = settings.output / "summary.partial.json"
    aside.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    aside.replace(settings.output / "summary.json")


def main() -> None:
    settings = Settings.from_environment()
    if get_nats_url() is None:  # a cluster's data loaders need the data before its ranks begin
        ensure_prepared(settings.data)
    info, recipe = load_info(settings.data), settings.recipe
    setup_seed(settings.seed)
    device_id = get_local_rank() if settings.enable_cuda and torch.cuda.is_available() else None
    model = DNN() if device_id is None else DNN().cuda(device_id)
    with TrainCtx(
        model=model,
        # One dense step averages a batch of every rank: the rate grows with what it averages.
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=recipe.dense_rate * (get_world_size() or 1)),
        embedding_optimizer=Adagrad(lr=recipe.embedding_rate),
        mixed_precision=False,
        consistency=settings.consistency,
        slots=settings.slots,
        device_id=device_id,
    ) as ctx:
        if settings.checkpoint:
            ctx.load_checkpoint(settings.checkpoint)  # all ranks: dense part, optimizer, embeddings
        loader = DataLoader(
            training_data(settings),
            reproducible=settings.reproducible,
            embedding_staleness=settings.embedding_staleness,
            # No more batches than these are looked up ahead, whatever the bound.
            forward_buffer_size=max(10, settings.embedding_staleness or 0),
        )
        window = 50 * recipe.batch_size
        if get_rank():
            train(ctx, loader, window, lambda step, loss: None)
            return
        with closing(HistoryWriter(settings.output / "history.jsonl")) as history:
            observer = Observer(ctx, model, settings, history)
            with observer.monitor:
                quality = train(ctx, loader, window, observer.after_step)
            print(
                f"last {quality.num_samples:,} training samples: AUC {quality.auc:.4f}, normalized entropy "
                f"{quality.normalized_entropy:.4f}, calibration {quality.calibration:.4f}",
                flush=True,
            )
            save(ctx, settings, info, observer)


if __name__ == "__main__":
    main()
