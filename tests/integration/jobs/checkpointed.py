"""A training script that loads a checkpoint first, dumps behind its own back, and reports its losses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adam
from persia.env import get_rank
from persia.errors import PersiaError
from persia.utils import setup_seed
from train import Model, digest


def load_in_vain(ctx: TrainCtx, checkpoint: str) -> dict[str, Any]:
    """What this rank is told, and whether anything has changed."""
    assert ctx.model is not None

    def state() -> tuple[object, ...]:
        return digest(ctx.model.parameters()), ctx.step, ctx.get_embedding_size()

    before = state()
    try:
        ctx.load_checkpoint(checkpoint, blocking=False)
        ctx.wait_for_load_embedding()
    except PersiaError as failure:
        return {"kind": type(failure).__name__, "text": str(failure), "unchanged": state() == before}
    return {"kind": None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--load", default=None)
    parser.add_argument("--refused", default=None, help="load that first, which must fail")
    parser.add_argument("--dump", default=None)
    parser.add_argument(
        "--dump-after", type=int, default=-1, help="dump, not waiting, after that many batches"
    )
    parser.add_argument("--in-place", action="store_true", help="that dump's rows stay in the servers' pools")
    parser.add_argument("--final", default=None, help="dump there at the end")
    options = parser.parse_args()
    setup_seed(7)
    model = Model()
    losses: list[float] = []
    with TrainCtx(
        model=model,
        embedding_optimizer=Adam(lr=0.05),
        dense_optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.1, 0.1), seed=3),
        mixed_precision=False,
    ) as ctx:
        refusal = None if options.refused is None else load_in_vain(ctx, options.refused)
        if options.load:
            ctx.load_checkpoint(options.load)
        print(f"at step {ctx.step}", flush=True)
        loader = DataLoader(StreamingDataset(buffer_size=10), reproducible=True, embedding_staleness=1)
        for batch in loader:
            output, labels = ctx.forward(batch)
            assert labels is not None
            loss = torch.nn.functional.mse_loss(output, labels[0])
            losses.append(loss.item())
            ctx.backward(loss)
            if ctx.step == options.dump_after:
                in_place = options.in_place
                ctx.dump_checkpoint(options.dump, blocking=False, keep_last=2, in_place=in_place)
            print(f"trained {ctx.step}", flush=True)
        ctx.wait_for_dump_embedding()
        if options.final:
            ctx.dump_checkpoint(options.final)
        report = {"losses": losses, "step": ctx.step, "digest": digest(model.parameters())}
        report["refusal"] = refusal
    path = options.output.with_name(f"{options.output.name}.rank{get_rank() or 0}.json")
    path.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
