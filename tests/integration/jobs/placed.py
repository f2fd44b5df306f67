"""Trains on `loader.py`, maybe after a checkpoint, and writes parameters and predictions to `--output`."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import torch
from loader import make_batch

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.env import get_rank
from persia.utils import setup_seed
from train import Model


def predictions(ctx: TrainCtx) -> list[float]:
    batch = make_batch(0)
    batch.requires_grad = False
    with torch.no_grad(), eval_ctx(model=ctx.model) as evaluation:
        output, _ = evaluation.forward(evaluation.get_embedding_from_data(batch))
    return torch.as_tensor(output).flatten().tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--load", default=None)
    parser.add_argument("--dump", default=None)
    options = parser.parse_args()
    setup_seed(7)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    report = {}
    with TrainCtx(
        SGD(lr=0.5), optimizer, model=model, embedding_config=EmbeddingConfig(emb_initialization=(-1.0, 1.0))
    ) as ctx:
        if options.load is not None:
            ctx.load_checkpoint(options.load)
            report["loaded"] = predictions(ctx)
        for number, batch in enumerate(DataLoader(StreamingDataset(buffer_size=10)), start=1):
            output, labels = ctx.forward(batch)
            assert labels is not None
            loss = torch.nn.functional.mse_loss(output, labels[0]) / options.accumulate
            with ctx.accumulate() if number % options.accumulate else nullcontext():
                ctx.backward(loss)
        ctx.wait_for_gradients()
        if ctx.world_size > 1:
            torch.distributed.barrier()  # the rows of the other rank's updates, too
        report["trained"] = predictions(ctx)
        report["rows"] = sum(ctx.get_embedding_size())
        report["parameters"] = [p.flatten().tolist() for p in model.parameters()]
        if options.dump is not None:
            ctx.dump_checkpoint(options.dump)
    rank = get_rank() or 0
    options.output.with_name(f"{options.output.name}.rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
