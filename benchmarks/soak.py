"""`python -m benchmarks.soak`: a small embedded job for many steps, whose memory must stay flat.

Every step looks up and trains IDs of which most are old and some are new, so that rows are made and evicted
all the time; now and then there is an evaluation, a batch without a backward pass, and a change of the
learning rate. The resident set is kept two hundred times and printed ten times. It fails where the last
quarter of the run takes more memory than the one before: a leak goes on, what is made once is made early.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import click
import numpy as np
import torch

from persia.embedding.optim import Adagrad
from persia.nn import ClickMetrics, EmbeddingBagCollection

_SLOTS = {"user": 16, "item": 16, "tags": 8}
_BATCH = 32
_CAPACITY = 50_000
_NUM_SAMPLES = 200  # of the resident set
_NUM_LINES = 10


class Job:
    """A model of everything the module offers, small enough for thousands of steps a second."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.bags = EmbeddingBagCollection(_SLOTS, Adagrad(lr=0.01), capacity=_CAPACITY, num_threads=1)
        self.tower = torch.nn.Linear(self.bags.out_features, 1)
        self.optimizer = torch.optim.SGD(self.tower.parameters(), lr=0.01)
        self.metrics = ClickMetrics(window=10_000, from_logits=True)
        self._generator = np.random.default_rng(seed)

    def step(self, number: int) -> None:
        values, lengths, labels = self._batch()
        logits = self.tower(self.bags(values, lengths))
        if number % 50 == 0:
            return  # a batch that is given up
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.metrics.update(logits, labels)
        if number % 1000 == 1:
            self.metrics.compute()
            self.bags.set_optimizer(Adagrad(lr=0.01 / (1 + number * 1e-6)))
            self.bags.eval()
            with torch.no_grad():
                self.bags(values, lengths)
            self.bags.train()

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lengths = self._generator.integers(0, 4, (len(_SLOTS), _BATCH))
        count = int(lengths.sum())
        values = self._generator.zipf(1.2, count) % (1 << 40)
        labels = (self._generator.random((_BATCH, 1)) < 0.3).astype(np.float32)
        return torch.from_numpy(values), torch.from_numpy(lengths), torch.from_numpy(labels)


def resident_bytes() -> int:
    """What the process holds in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth_bytes(samples: list[int]) -> int:
    """Between the third and the fourth quarter, by their least: peaks of a moment do not count."""
    quarter = len(samples) // 4
    return min(samples[3 * quarter :]) - min(samples[2 * quarter : 3 * quarter])


def soak(steps: int, max_seconds: float, seed: int) -> list[int]:
    """Resident bytes over the run, which ends with the steps or the time."""
    job, samples = Job(seed), []
    begin = last_line = time.monotonic()
    every = max(1, steps // _NUM_SAMPLES)
    for number in range(steps):
        job.step(number)
        if number % every:
            continue
        samples.append(resident_bytes())
        now = time.monotonic()
        is_due = len(samples) % (_NUM_SAMPLES // _NUM_LINES) == 1 or now - last_line > 30
        if is_due:
            last_line = now
            stats = job.bags.stats()
            print(
                f"step {number:>10,}  {now - begin:7.1f} s  resident {samples[-1] / 2**20:8.2f} MiB  "
                f"store {stats.memory_bytes / 2**20:6.2f} MiB  rows {stats.num_rows:,}  "
                f"evicted {stats.num_evicted:,}",
                flush=True,
            )
        if now - begin > max_seconds:
            print(f"time is up after {number + 1:,} steps", flush=True)
            break
    return samples


@click.command(help=__doc__)
@click.option("--steps", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=float("inf"),
    help="End earlier, after so long.",
)
@click.option(
    "--allow-kib", type=click.IntRange(0), default=512, show_default=True, help="Growth that is no failure."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def main(steps: int, seconds: float, allow_kib: int, seed: int) -> None:
    torch.set_num_threads(1)
    samples = soak(steps, seconds, seed)
    if len(samples) < 8:
        sys.exit("too few steps to judge: give it more time")
    growth = growth_bytes(samples)
    print(f"growth from the third to the fourth quarter: {growth / 1024:,.0f} KiB (allowed: {allow_kib} KiB)")
    if growth > allow_kib * 1024:
        sys.exit("memory grows")


if __name__ == "__main__":
    main()
