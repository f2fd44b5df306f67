"""Trains DLRM or DCNv2: `python train.py` in one process; README.md shows a cluster, and Criteo's data."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch.optim.lr_scheduler import LambdaLR

from persia import TrainCtx
from persia.embedding.lr_schedule import LRSchedule
from persia.env import get_rank, get_world_size
from persia.errors import UnavailableError
from persia.serving.evaluation import PredictionClient, accuracy
from persia.train import Callback
from persia.utils import setup_seed
from recipe import Recipe, parse


class Curve(Callback):
    """The evaluations, for the table at the end."""

    def __init__(self) -> None:
        self.points: list[tuple[int, Mapping[str, float], float]] = []
        self._begin = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "auc" in values:
            self.points.append((step, values, time.monotonic() - self._begin))


def train(recipe: Recipe) -> None:
    flags = recipe.flags
    setup_seed(flags.seed)
    if not flags.synthetic and flags.check_data and not get_rank():
        for batches in (recipe.train, recipe.valid):
            getattr(batches, "batches", batches).check_values()
    model = recipe.model()
    sparse, dense = recipe.optimizers(model)
    schedule, curve = partial(LambdaLR, lr_lambda=recipe.schedule()), Curve()
    trainer = recipe.trainer([schedule(dense), LRSchedule(sparse, schedule)], [curve])
    if flags.compile:
        model.compile()
    begin = time.monotonic()
    precision = "bf16" if flags.amp else False
    with TrainCtx(sparse, dense, model=model, slots=recipe.slots(), mixed_precision=precision) as ctx:
        fit = trainer.fit(ctx, embedding_staleness=flags.embedding_staleness)
        if not get_rank():
            show(recipe, curve, fit.best["auc"], fit.stopped_early, time.monotonic() - begin)
            print(f"training waited {fit.waited_s:.1f} s for batches")
        serves = flags.serve and recipe.num_ranks == 1
        with tempfile.TemporaryDirectory(prefix="criteo-") as folder:
            if flags.export_path or serves:
                export(ctx, recipe, folder := flags.export_path or folder)
            if serves:
                serve(recipe, folder)


def show(recipe: Recipe, curve: Curve, auc: float, has_target: bool, seconds: float) -> None:
    """The AUC curve, and the result beside the best one that there can be."""
    table = Table("step", "seconds", "AUC", "log loss")
    for step, values, at in curve.points:
        table.add_row(str(step), f"{at:.1f}", f"{values['auc']:.5f}", f"{values['log_loss']:.5f}")
    console = Console()
    console.print(table)
    console.print(f"AUC {auc:.5f}{' (target)' if has_target else ''} after {seconds:.1f} s", highlight=False)
    if recipe.planted is not None:
        best = recipe.planted.best_auc()
        console.print(f"AUC of the planted model {best:.5f}, difference {best - auc:.5f}", highlight=False)


def export(ctx: TrainCtx, recipe: Recipe, folder: str) -> None:
    """Writes what `persia-launcher serve` needs: `model` and `embedding_config.yml` in `folder`."""
    ctx.dump_checkpoint(f"{folder}/model", with_jit_model=True)
    if not get_rank():
        content = yaml.safe_dump(recipe.slots(), sort_keys=False)
        (Path(folder) / "embedding_config.yml").write_text(content, encoding="utf-8")


def serve(recipe: Recipe, folder: str) -> None:
    """Serves the trained model of `folder` for a moment, and asks it about the held-out clicks."""
    slots = Path(folder) / "embedding_config.yml"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "persia.launcher", "serve", f"{folder}/model", "--port", str(port)]
    command += ["--embedding-config", str(slots), "--max-batch-size", str(recipe.flags.test_batch_size)]
    command += ["--max-request-mib", "64"]
    server = subprocess.Popen(command)
    try:
        with _client(server, f"127.0.0.1:{port}") as client:
            quality = accuracy(client, recipe.valid)
            first = recipe.valid.make(next(recipe.valid.read()), requires_grad=False)
            logit, label = client.predict(first.to_bytes())[0], first.labels[0].data[0, 0]
    finally:
        end(server)
    predicted = 1 / (1 + math.exp(-logit))
    print(f"served AUC {quality.auc:.5f}; first sample: predicted {predicted:.4f}, label {label:.0f}")


def end(server: subprocess.Popen[bytes], wait_s: float = 60.0) -> None:
    """Ends the server; kills it if it takes longer than `wait_s`."""
    server.terminate()
    try:
        server.wait(wait_s)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(60)


def _client(server: subprocess.Popen[bytes], address: str, wait_s: float = 600.0) -> PredictionClient:
    deadline = time.monotonic() + wait_s
    while server.poll() is None:
        with suppress(UnavailableError):  # it is loading
            return PredictionClient(address, wait_s=min(20.0, wait_s))
        if time.monotonic() > deadline:
            sys.exit(f"the server does not answer at {address} within {wait_s:g} s")
    sys.exit("the server ended before it answered; its last message says why")


def main(words: Sequence[str] | None = None) -> None:
    flags = parse(words)
    is_job = flags.mode == "train"  # else the flag says how many ranks the job will have
    recipe = Recipe(flags, (get_world_size() if is_job else flags.num_ranks) or 1)
    if flags.mode == "write_config":
        # In the order of the feature spec, which decides the numbers of the slots' groups.
        content = yaml.safe_dump(recipe.slots(), sort_keys=False)
        Path("embedding_config.yml").write_text(content, encoding="utf-8")
    elif flags.mode == "write_data":
        for mapping, batches in (("train", recipe.train), ("test", recipe.valid)):
            batches.write_split_binary(flags.dataset, mapping)
    else:
        train(recipe)


if __name__ == "__main__":
    torch.set_num_interop_threads(1)
    main()
