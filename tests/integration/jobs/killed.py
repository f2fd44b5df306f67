"""A training that is a function of its step numbers, to be killed and compared with one that was not.

As a program it trains over and over, in a child for each line of its input, which is the directory of
checkpoints, and prints its process id. Children are forked from a process that has imported everything,
and begin at once; what they have reached they print, too.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
from loader import make_batch

from persia.ctx import TrainCtx
from persia.data import PersiaTrainingBatch
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adam
from persia.utils import setup_seed
from train import Model

DUMP_EVERY = 2


def make_ctx(**options: object) -> TrainCtx:
    setup_seed(7)
    model = Model()
    return TrainCtx(
        model=model,
        embedding_optimizer=Adam(lr=0.05),
        dense_optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.1, 0.1), seed=3),
        mixed_precision=False,
        **options,  # type: ignore[arg-type]
    )


def train_step(ctx: TrainCtx) -> None:
    batch: PersiaTrainingBatch = ctx.get_embedding_from_data(make_batch(ctx.step))
    output, labels = ctx.forward(batch)
    assert labels is not None
    ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
    ctx.wait_for_gradients()


def train(root: Path) -> None:
    """Until it is killed. Each line that it prints is a step whose checkpoint counts."""
    with make_ctx() as ctx:
        if (root / "latest").exists():
            ctx.load_checkpoint(root)
        print(f"began {ctx.step}", flush=True)
        while True:
            train_step(ctx)
            if ctx.step % DUMP_EVERY == 0:
                ctx.dump_checkpoint(root, keep_last=2, in_place=True, blocking=False)
                train_step(ctx)  # while it is being written
                ctx.wait_for_dump_embedding()
                print(f"counts {ctx.step - 1}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                train(Path(line.strip()))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        print(f"child {child}", flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
