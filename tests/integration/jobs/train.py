"""A training script that writes what happened to `--output`.rank<N>.json, also when it fails."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from persia.ctx import DataCtx, TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.distributed import DDPOption
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.env import get_local_rank, get_rank, get_resume_checkpoint
from persia.errors import PersiaError
from persia.utils import setup_seed


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(18, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.layers(torch.cat(dense + embeddings, dim=1))
        return output


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Equal for equal tensors, to the last bit."""
    values = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(values).hexdigest()


def momenta(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Empty for a rank that has not trained."""
    (group,) = optimizer.param_groups
    states = (optimizer.state[parameter] for parameter in group["params"])
    return [state["momentum_buffer"] for state in states if state]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--staleness", type=int, default=None)
    parser.add_argument("--consistency", default="hybrid")
    parser.add_argument("--cuda", action="store_true", help="a device for each rank, and nccl")
    parser.add_argument("--sync-file", type=Path, default=None, help="where ranks meet; else over TCP")
    parser.add_argument("--fail-rank", type=int, default=-1, help="the only rank that --fail-after concerns")
    parser.add_argument("--stop-after", type=int, default=-1, help="leave the loop after that many batches")
    parser.add_argument("--fail-after", type=int, default=-1, help="raise after that many batches")
    parser.add_argument("--embedded-loader", type=int, default=0, help="batches to feed, without a broker")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between batches")
    parser.add_argument("--gate", type=Path, default=None, help="wait for this file before batch --gate-at")
    parser.add_argument(
        "--gate-at", type=int, action="append", default=[], help="N; at the second one, for GATE-2, and so on"
    )
    parser.add_argument(
        "--ahead", type=int, default=0, help="batches in flight before the first step and at the gate"
    )
    parser.add_argument("--dump", default=None, help="a checkpoint there after --dump-after batches")
    parser.add_argument("--dump-after", type=int, default=-1)
    parser.add_argument("--dump-at-the-end", action="store_true", help="also after an error")
    parser.add_argument("--dump-late", action="store_true", help="once the other ranks have left")
    parser.add_argument("--on-lost-rows", default="raise")
    parser.add_argument("--skip-every", type=int, default=0, help="no backward for every n-th batch")
    return parser.parse_args()


def feed(num_batches: int) -> None:
    """What loader.py does, on a thread of this process: called in embedded jobs only."""
    from loader import make_batch

    with DataCtx() as ctx:
        for batch_id in range(num_batches):
            ctx.send_data(make_batch(batch_id))


def wait_until_ahead(ctx: TrainCtx, num_batches: int) -> None:
    deadline = time.monotonic() + 60
    while (ahead := ctx.staleness.in_flight) < num_batches:
        assert time.monotonic() < deadline, f"{ahead} batches are in flight, not {num_batches}"
        time.sleep(0.01)


def train(ctx: TrainCtx, options: argparse.Namespace, report: dict[str, Any]) -> None:
    loader = DataLoader(
        StreamingDataset(buffer_size=10, loader=lambda: feed(options.embedded_loader)),
        reproducible=options.reproducible,
        embedding_staleness=options.staleness,
    )
    for position, batch in enumerate(loader):
        report["batch_ids"].append(batch.batch_id)
        report["workers"].append(batch.result.reference.worker_index)
        if position == 0:
            wait_until_ahead(ctx, options.ahead)
        if position in options.gate_at:
            from loader import wait_for_gate

            wait_until_ahead(ctx, options.ahead)
            print("at the gate", flush=True)
            number = options.gate_at.index(position) + 1
            wait_for_gate(
                options.gate if number == 1 else options.gate.with_name(f"{options.gate.name}-{number}")
            )
        time.sleep(options.pace)
        assert batch.meta == str(batch.batch_id).encode()
        report["max_in_flight"] = max(report["max_in_flight"], ctx.staleness.in_flight)
        output, labels = ctx.forward(batch)
        assert labels is not None
        loss = torch.nn.functional.mse_loss(output, labels[0])
        report["losses"].append(loss.item())
        print(f"batch {batch.batch_id}", flush=True)
        if options.skip_every and position % options.skip_every == 0:
            continue
        ctx.backward(loss)
        if position + 1 == options.dump_after:
            ctx.dump_checkpoint(options.dump, extra={"batch_ids": report["batch_ids"]})
            print("dumped", flush=True)
        if position + 1 == options.stop_after:
            break
        if position + 1 == options.fail_after and options.fail_rank in (-1, get_rank()):
            raise ValueError(f"boom after {options.fail_after} batches")


def dump_at_the_end(ctx: TrainCtx, options: argparse.Namespace, report: dict[str, Any]) -> None:
    if options.dump_late and get_rank() == 0:
        time.sleep(5)
    try:
        ctx.dump_checkpoint(options.dump)
    except PersiaError as error:
        report["refused"] = f"{type(error).__name__}: {error}"


def main() -> None:
    options = parse()
    setup_seed(7)
    device_id = get_local_rank() if options.cuda else None
    model = Model() if device_id is None else Model().cuda(device_id)
    report: dict[str, Any] = {"batch_ids": [], "workers": [], "losses": [], "max_in_flight": 0, "error": None}
    ctx = TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.05),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.1, 0.1), seed=3),
        mixed_precision=False,
        device_id=device_id,
        consistency=options.consistency,
        on_lost_rows=options.on_lost_rows,
        distributed_option=(
            DDPOption("file", "gloo", sync_file=options.sync_file) if options.sync_file else None
        ),
    )
    try:
        with ctx:
            if (checkpoint := get_resume_checkpoint()) is not None:
                report["extra"] = ctx.load_checkpoint(checkpoint)
                report["resumed"] = {"step": ctx.step, "digest": digest(model.parameters())}
                report["resumed"]["optimizer_digest"] = digest(momenta(ctx.dense_optimizer))
            try:
                train(ctx, options, report)
            finally:
                if options.dump_at_the_end:
                    dump_at_the_end(ctx, options, report)
            report["sizes"] = ctx.get_embedding_size()
    except BaseException as error:
        report["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        report["counters"] = dataclasses.asdict(ctx.counters)
        report["staleness"] = dataclasses.asdict(ctx.staleness)
        report["digest"] = digest(model.parameters())
        report["optimizer_digest"] = digest(momenta(ctx.dense_optimizer))
        report["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("persia")]
        path = options.output.with_name(f"{options.output.name}.rank{get_rank() or 0}.json")
        path.write_text(json.dumps(report))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
