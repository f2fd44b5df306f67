"""The NN worker: one pass of hybrid training over the stream of the data loaders, test AUC, a checkpoint.

Run by `persia-launcher nn-worker`; settings come from the environment (see settings.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing

import torch
from torch import nn

from dataset import BATCH_SIZE, DatasetInfo, load_info, load_split
from evaluate import evaluate
from history import HistoryWriter
from model import DNN
from monitor import Monitor
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.optim import Adagrad
from persia.env import get_local_rank, get_rank, get_world_size
from persia.utils import setup_seed
from settings import Settings

NUM_EVALUATIONS = 5  # The last of them at the end.


def train(ctx: TrainCtx, loader: DataLoader, after_step: Callable[[int, float], None]) -> None:
    """One pass over the stream; `after_step` gets the step, counted from 1, and its loss."""
    loss_function = nn.BCELoss()
    for step, batch in enumerate(loader, start=1):
        output, labels = ctx.forward(batch)
        assert labels is not None, "only inference has none"
        loss = loss_function(output, labels[0])
        ctx.backward(loss)
        after_step(step, loss.item())


class Observer:
    """What rank 0 does beside training: progress, history, and the evaluations on the way."""

    def __init__(self, ctx: TrainCtx, model: DNN, settings: Settings, history: HistoryWriter) -> None:
        world_size = get_world_size() or 1
        num_batches = load_split(settings.data, "train").num_full_batches
        self._num_steps = -(-num_batches // world_size)
        self._ctx = ctx
        self._model = model
        self._test_split = load_split(settings.data, "test")
        self.monitor = Monitor(self._num_steps, BATCH_SIZE * world_size, history)

    def after_step(self, step: int, loss: float) -> None:
        self.monitor.step(step, loss, self._ctx.staleness.in_flight)
        interval = max(1, self._num_steps // NUM_EVALUATIONS)
        if step % interval == 0 and step + interval <= self._num_steps:
            self.evaluate(step)

    def evaluate(self, step: int | None = None) -> float:
        """Test AUC after that step, by default the last; the throughput's clock stands still meanwhile."""
        with self.monitor.throughput.paused():
            test_auc = evaluate(self._model, self._test_split, self._ctx.device_id)
        self.monitor.evaluated(self._num_steps if step is None else step, test_auc)
        return test_auc


def save(ctx: TrainCtx, settings: Settings, info: DatasetInfo, observer: Observer) -> None:
    """Final evaluation, checkpoint of the dense part, and last the summary: it says that all is there."""
    test_auc = observer.evaluate()
    checkpoint = settings.output / "checkpoint"
    ctx.dump_checkpoint(str(checkpoint), with_jit_model=True)
    summary = {
        "dataset": info.dataset,
        "test_auc": test_auc,
        "samples_per_second": observer.monitor.throughput.overall(),
        "max_staleness": observer.monitor.max_staleness,
        "num_embeddings": sum(ctx.get_embedding_size()),
        "seed": settings.seed,
        "reproducible": settings.reproducible,
        "embedding_staleness": settings.embedding_staleness,
        "paths": {"history": str(settings.output / "history.jsonl"), "checkpoint": str(checkpoint)},
    }
    print(
        f"test AUC {test_auc:.7f}, {summary['samples_per_second']:,.0f} samples/s, "
        f"at most {summary['max_staleness']} batches in flight, {summary['num_embeddings']} embeddings; "
        f"the dense part is in {checkpoint}",
        flush=True,
    )
    aside = settings.output / "summary.partial.json"
    aside.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    aside.replace(settings.output / "summary.json")


def main() -> None:
    settings = Settings.from_environment()
    info = load_info(settings.data)
    setup_seed(settings.seed)
    device_id = get_local_rank() if settings.enable_cuda and torch.cuda.is_available() else None
    model = DNN() if device_id is None else DNN().cuda(device_id)
    with TrainCtx(
        model=model,
        # One dense step averages a batch of every rank: the rate grows with what it averages.
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1 * (get_world_size() or 1)),
        embedding_optimizer=Adagrad(lr=1e-2),
        mixed_precision=False,
        device_id=device_id,
    ) as ctx:
        loader = DataLoader(
            StreamingDataset(buffer_size=10),
            reproducible=settings.reproducible,
            embedding_staleness=settings.embedding_staleness,
        )
        if get_rank():
            train(ctx, loader, lambda step, loss: None)
            return
        with closing(HistoryWriter(settings.output / "history.jsonl")) as history:
            observer = Observer(ctx, model, settings, history)
            with observer.monitor:
                train(ctx, loader, observer.after_step)
            save(ctx, settings, info, observer)


if __name__ == "__main__":
    main()
