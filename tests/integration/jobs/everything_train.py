"""A training script that uses all there is, checks what it gets, and reports. See test_everything.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from everything_loader import EVALUATED_EVERY

from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.initializers import Normal
from persia.embedding.lr_schedule import LRSchedule
from persia.embedding.optim import Adagrad
from persia.env import get_rank
from persia.pipeline.batch import PersiaTrainingBatch
from persia.utils import setup_seed

STALENESS = 4
DEADLINE_S = 120.0
UNUSED = 12  # number of its slot
WIDTHS = [8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4 + sum(WIDTHS), 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        pooled = []
        for slot in embeddings[:UNUSED]:
            if slot.dim() == 3:
                rows, mask = slot[:, :, :-1], slot[:, :, -1:]
                slot = (rows * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            pooled.append(slot)
        floats = [dense[0], dense[1].float() / 10, dense[2].float() / 100]
        output: torch.Tensor = self.layers(torch.cat([*floats, *pooled], dim=1))
        return output


def check(batch: PersiaTrainingBatch, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> None:
    """What the loader sent and what the slots promise."""
    assert batch.meta == f"batch {batch.batch_id}".encode()
    assert [tensor.dtype for tensor in dense] == [torch.float32, torch.uint16, torch.uint32]
    assert all(embedding.isfinite().all() for embedding in embeddings)
    clicks = embeddings[4].detach()
    assert clicks.shape[1:] == (5, 5)
    assert torch.equal(clicks[:, :, -1].sum(dim=1), dense[1].float()[:, 0].clamp(max=5))
    assert embeddings[5].shape[1:] == (3, 5)
    # Refused IDs read as zeros; bfloat16 has rounded the bound, if at all, to itself.
    assert embeddings[6].abs().max() <= 0.25
    assert (embeddings[6] == 0).all(dim=1).any()


def clip(slot: str, gradient: torch.Tensor) -> torch.Tensor:
    """Gradient clipping; and now and then what a broken model would give."""
    clip.calls += 1  # type: ignore[attr-defined]
    if slot == "broken" and clip.calls % 5 == 0:  # type: ignore[attr-defined]
        return gradient * float("nan")
    return gradient.clamp_(-0.1, 0.1)


clip.calls = 0  # type: ignore[attr-defined]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--leave", type=Path, required=True, help="a file that says when to end")
    parser.add_argument("--pace", type=float, required=True, help="seconds between batches")
    options = parser.parse_args()
    setup_seed(7)
    model = Model()
    optimizer = Adagrad(lr=0.05)
    ctx = TrainCtx(
        model=model,
        embedding_optimizer=optimizer,
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5),
        embedding_config=EmbeddingConfig(emb_initialization=Normal(std=0.02), weight_bound=2.0, seed=3),
        mixed_precision="bf16",
        before_dense_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        on_embedding_gradient=clip,
    )
    schedule = LRSchedule(
        optimizer, lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=8)
    )
    max_in_flight, losses, num_skipped = 0, [], 0
    with ctx:
        for position, batch in enumerate(DataLoader(StreamingDataset(10), embedding_staleness=STALENESS)):
            time.sleep(options.pace)
            dense, embeddings, labels = ctx.prepare_features(batch)
            check(batch, dense, embeddings)
            max_in_flight = max(max_in_flight, ctx.staleness.in_flight)
            if batch.batch_id % EVALUATED_EVERY < 2:
                assert not embeddings[0].requires_grad
                continue
            if position % 13 == 5:
                num_skipped += 1
                continue
            with torch.autocast("cpu", torch.bfloat16):
                output = ctx.model(dense, embeddings)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(output.float(), labels[0])
            with ctx.accumulate() if position % 4 == 1 else nullcontext():
                ctx.backward(loss)
            losses.append(loss.item())
            if position % 10 == 0:
                schedule.step()
        ctx.wait_for_gradients()
        ctx.dump_checkpoint(options.checkpoint)
        report = {
            "counters": dataclasses.asdict(ctx.counters),
            "staleness": dataclasses.asdict(ctx.staleness),
            "max_in_flight": max_in_flight,
            "losses": losses,
            "num_skipped": num_skipped,
            "lr": optimizer.lr,
            "weights": [p.sum().item() for p in model.parameters()],
        }
        path = options.output.with_name(f"{options.output.name}.rank{get_rank()}.json")
        path.write_text(json.dumps(report))
        print("rank done.", flush=True)
        wait_for(options.leave)


if __name__ == "__main__":
    main()
