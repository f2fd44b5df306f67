"""A training script with a recovery: an ordinary loop, which writes down what it has trained.

Its arguments are a folder, the steps between two checkpoints, the seconds between two batches, and the number
of batches, which the script makes itself where there is no broker. One more is the CUDA device to train on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from persia import DataLoader, EmbeddingConfig, Recovery, StreamingDataset, TrainCtx, optim
from persia.utils import setup_seed
from train import Model, digest, feed


@contextmanager
def training(model: torch.nn.Module, folder: Path, **recovery: Any) -> Iterator[tuple[TrainCtx, TextIO]]:
    """The context, and the file that takes lines of what it trains; dumps what it has trained at the end."""
    device = int(sys.argv[5]) if len(sys.argv) > 5 else None
    if device is not None:
        model.cuda(device)
    ctx = TrainCtx(
        model=model,
        embedding_optimizer=optim.Adagrad(lr=0.05),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.1, 0.1), seed=3),
        mixed_precision=False,
        recovery=Recovery(folder / "recovery", **recovery),
        on_lost_rows="recover",
        device_id=device,
    )
    with ctx, (folder / f"rank{ctx.rank}.log").open("a", buffering=1) as log:
        log.write(f"begin {ctx.step}\n")
        yield ctx, log
        ctx.dump_checkpoint(folder / "final")
    if ctx.rank == 0:
        (folder / "dense.sha256").write_text(digest(model.parameters()))


def main() -> None:
    folder, every_steps, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    data = StreamingDataset(buffer_size=10, loader=lambda: feed(int(sys.argv[4])))
    setup_seed(7)
    with training(Model(), folder, every_steps=every_steps) as (ctx, log):
        for batch in DataLoader(data, reproducible=ctx.world_size == 1):
            time.sleep(pace_s)
            output, labels = ctx.forward(batch)
            assert labels is not None
            ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
            log.write(f"{ctx.step} {(batch.meta or b'').decode()}\n")
            # One write: lines of several ranks must not mix.
            sys.stdout.write(f"step {ctx.step}\n")


if __name__ == "__main__":
    main()
