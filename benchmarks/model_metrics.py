"""`python -m benchmarks.model_metrics`: what ClickMetrics adds to a step, measured inside a training loop.

Steps of one model are timed in turns with and without `update`; `compute` is timed by itself, and charged to
the steps between two of them. Times are of the processor, on one thread, so that what else the
machine does counts little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch

from persia.embedding.optim import Adagrad
from persia.nn import ClickMetrics, EmbeddingBagCollection

_NUM_SLOTS, _DIM = 26, 16  # as many as the Criteo data has


class Job:
    def __init__(self, batch: int) -> None:
        slots = {f"slot{i}": _DIM for i in range(_NUM_SLOTS)}
        self.bags = EmbeddingBagCollection(slots, Adagrad(lr=0.01), num_threads=1)
        self.tower = torch.nn.Sequential(
            torch.nn.Linear(_NUM_SLOTS * _DIM, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
        )
        self.optimizer = torch.optim.SGD(self.tower.parameters(), lr=0.01)
        self.values = torch.randint(0, 100_000, (_NUM_SLOTS * batch,))
        self.lengths = torch.ones(_NUM_SLOTS, batch, dtype=torch.int64)
        self.labels = torch.randint(0, 2, (batch, 1)).float()
        self.users = torch.randint(0, 10_000, (batch,))

    def step(self) -> torch.Tensor:
        logits: torch.Tensor = self.tower(self.bags(self.values, self.lengths))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, self.labels)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        return logits


def seconds_of(action: Callable[[], object], times: int) -> float:
    begin = time.process_time()
    for _ in range(times):
        action()
    return (time.process_time() - begin) / times


@click.command(help=__doc__)
@click.option("--batch", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--window", type=click.IntRange(1), default=100_000, show_default=True)
@click.option(
    "--every",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Steps from one compute to the next.",
)
@click.option("--rounds", type=click.IntRange(1), default=30, show_default=True)
@click.option("--users/--no-users", "has_users", default=True, help="GAUC as well.")
def main(batch: int, window: int, every: int, rounds: int, has_users: bool) -> None:
    torch.set_num_threads(1)
    job, metrics = Job(batch), ClickMetrics(window, from_logits=True)
    logits = job.step()
    users = job.users if has_users else None

    def update() -> None:
        metrics.update(logits, job.labels, users)

    def step_and_update() -> None:
        metrics.update(job.step(), job.labels, users)

    plain, updates, computes = [], [], []
    for _ in range(max(3, window // batch)):
        update()
    for _ in range(rounds):
        plain.append(seconds_of(job.step, 5))
        updates.append(seconds_of(step_and_update, 5))
    for _ in range(max(3, rounds // 3)):
        computes.append(seconds_of(metrics.compute, 1))
    update_alone = seconds_of(update, 2000)
    step, with_update, compute = (statistics.median(times) for times in (plain, updates, computes))
    print(f"step of {batch} samples        {step * 1e3:8.3f} ms")
    print(
        f"step with update           {with_update * 1e3:8.3f} ms  ({100 * (with_update / step - 1):+.2f} %)"
    )
    print(
        f"update by itself           {update_alone * 1e6:8.1f} us  "
        f"({100 * update_alone / step:.2f} % of a step)"
    )
    print(f"compute over {window} samples {compute * 1e3:8.3f} ms")
    share = (update_alone + compute / every) / step
    print(f"both, compute every {every} steps: {100 * share:.2f} % of a step")


if __name__ == "__main__":
    main()
