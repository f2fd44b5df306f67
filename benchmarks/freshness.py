"""How old predictions are: from an update on the trainer until a server answers with it.

Intervals are the defaults unless they are given.

    python -m benchmarks.freshness --seconds 60

A process trains without a pause and writes packets, another one follows them (`persia-launcher serve
--incremental-dir`), and this one asks it for predictions. Every training step adds 1 to one row, and the
served model returns that row, so that a prediction tells of each update whether it is visible. An update
counts from the moment at which the script hands its gradients over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, List  # noqa: UP035 - torch.jit.script resolves typing.List

import grpc
import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from benchmarks.arguments import number, whole
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.security import http_token
from persia.serving.protocol import SERVICE, message

SLOTS = {"slots_config": {"counter": {"dim": 1}, "item": {"dim": 16}}}
BATCH = 256
START_S = 120.0
ASK_EVERY_S = 0.02
FLOOR_S = 2.4


class Model(torch.nn.Module):
    """Learns from items, and returns the counter's row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        return embeddings[0] + 1e-6 * torch.tanh(self.layer(embeddings[1])) + 0.0 * dense[0]


class Traffic(IterableDataset):
    """Batches of random items at a steady rate; each has the counter once in every sample."""

    def __init__(self, num_rows: int, rate: float) -> None:
        super().__init__(buffer_size=2)
        self.num_rows, self.rate = num_rows, rate

    def __iter__(self) -> Iterator[PersiaBatch]:
        generator = np.random.default_rng(0)
        due = time.monotonic()
        while True:
            yield PersiaBatch(
                [
                    IDTypeFeatureWithSingleID("counter", np.ones(BATCH, np.uint64)),
                    IDTypeFeatureWithSingleID("item", generator.integers(0, self.num_rows, BATCH, np.uint64)),
                ],
                [NonIDTypeFeature(np.zeros((BATCH, 1), np.float32))],
                [Label(np.zeros((BATCH, 1), np.float32))],
            )
            due += 1 / self.rate
            time.sleep(max(0.0, due - time.monotonic()))


def train(directory: Path, num_rows: int, rate: float, interval_ms: int) -> None:
    """Until it is told to stop. Writes the time of each step, as eight bytes, to `steps`."""
    model = Model()
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    section = {
        "enable_incremental_update": True,
        "incremental_dir": str(directory / "packets"),
        "incremental_interval_ms": interval_ms,
    }
    with (
        (directory / "steps").open("wb", buffering=0) as steps,
        TrainCtx(
            SGD(1.0),
            torch.optim.SGD(model.parameters(), 0.1),
            model=model,
            mixed_precision=False,
            slots=SLOTS,
            global_config={"embedding_parameter_server_config": section},
            embedding_config=EmbeddingConfig(emb_initialization=(0.0, 0.0), weight_bound=1e9),
        ) as ctx,
    ):
        for batch in DataLoader(Traffic(num_rows, rate)):
            output, _ = ctx.forward(batch)
            steps.write(np.float64(time.time()).tobytes())
            ctx.backward(-output.mean())  # minus 1 is the gradient of the counter, over all samples
            if ctx.step == 50:
                ctx.dump_checkpoint(str(directory / "model"), with_jit_model=True)
            if stopped:
                return


@contextlib.contextmanager
def running(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended with the block."""
    environment = {name: value for name, value in os.environ.items() if name != "PERSIA_NATS_URL"}
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            [sys.executable, "-m", *command], stdout=sink, stderr=sink, env=environment
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def found(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    """What a process says when it is ready."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        match = re.search(pattern, log.read_text())
        if match:
            return match.group(1)
        time.sleep(0.05)
    raise RuntimeError(f"not ready: {log.read_text()}")


def ask(address: str, seconds: float) -> list[tuple[float, float]]:
    """(when it was answered, value of the counter) of each prediction."""
    request = message("ModelInferRequest")(model_name="model")
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID(slot, np.ones(1, np.uint64)) for slot in SLOTS["slots_config"]],
        [NonIDTypeFeature(np.zeros((1, 1), np.float32))],
        requires_grad=False,
    )
    tensor = request.inputs.add(name="batch", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(batch.to_bytes())
    seen = []
    with grpc.insecure_channel(address) as channel:
        infer: Any = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=lambda value: value.SerializeToString(),
            response_deserializer=message("ModelInferResponse").FromString,
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            reply = infer(request, timeout=10)
            seen.append((time.time(), float(np.frombuffer(reply.raw_output_contents[0], np.float32)[0])))
            time.sleep(ASK_EVERY_S)
    return seen


def delays_of(steps: NDArray[np.float64], seen: list[tuple[float, float]]) -> NDArray[np.float64]:
    """Of every step made and seen while predictions were asked for: seconds until the first that shows it."""
    when, values = np.array(seen).T
    counts = np.rint(np.maximum.accumulate(values)).astype(np.int64)
    numbers = np.arange(counts[0] + 1, counts[-1] + 1)  # step n has made the counter n
    numbers = numbers[steps[numbers - 1] >= when[0]]
    delays: NDArray[np.float64] = when[np.searchsorted(counts, numbers)] - steps[numbers - 1]
    return delays


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=number(above=0), default=60.0, help="how long predictions are asked for"
    )
    parser.add_argument("--rows", type=whole(1), default=1_000_000, help="items that training touches")
    parser.add_argument(
        "--rate", type=number(above=0), default=50.0, help="training steps a second, of 256 samples"
    )
    parser.add_argument("--interval-ms", type=whole(10), default=200, help="between two packets")
    parser.add_argument("--poll", type=number(above=0), default=0.25, help="seconds between looks for one")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.rows, options.rate, options.interval_ms)
        return
    with tempfile.TemporaryDirectory(prefix="persia-") as folder, contextlib.ExitStack() as stack:
        directory = Path(folder)
        (directory / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS, sort_keys=False))
        arguments = ["--train", folder, "--rows", str(options.rows), "--rate", str(options.rate)]
        arguments += ["--interval-ms", str(options.interval_ms)]
        trainer = stack.enter_context(running(directory / "train.log", "benchmarks.freshness", *arguments))
        end = time.monotonic() + START_S
        while not (directory / "model" / "manifest.json").exists():
            if trainer.poll() is not None or time.monotonic() > end:
                raise RuntimeError((directory / "train.log").read_text())
            time.sleep(0.1)
        log = directory / "serve.log"
        serve = ["persia.launcher", "serve", str(directory / "model"), "--port", "0"]
        serve += ["--embedding-config", str(directory / "embedding_config.yml")]
        serve += ["--incremental-dir", str(directory / "packets"), "--incremental-poll", str(options.poll)]
        server = stack.enter_context(running(log, *serve))
        metrics = found(log, r"metrics and status are at (\S+:\d+)", server)
        seen = ask(found(log, r"is served at (\S+:\d+)", server), options.seconds)
        authorization = {"Authorization": f"Bearer {http_token()}"}
        request = urllib.request.Request(f"http://{metrics}/metrics", headers=authorization)
        with urllib.request.urlopen(request, timeout=10) as answer:
            page = answer.read().decode()
        delays = delays_of(np.fromfile(directory / "steps", np.float64), seen)
    gauge = re.search(r"^inc_update_delay_sec\S* (\S+)", page, re.MULTILINE)
    print(f"{len(delays)} updates in {options.seconds:g} s, {len(seen)} predictions")
    print(
        f"from update to visible: median {np.median(delays):.2f} s, p99 {np.quantile(delays, 0.99):.2f} s, "
        f"longest {delays.max():.2f} s (floor {FLOOR_S} s); inc_update_delay_sec "
        f"{float(gauge.group(1)) if gauge else float('nan'):.2f} s"
    )
    sys.exit(0 if np.quantile(delays, 0.99) < FLOOR_S else 1)


if __name__ == "__main__":
    main()
