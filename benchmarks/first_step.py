"""`python -m benchmarks.first_step`: how long a script in one process waits for its first step.

Each round is a process of its own, without broker or servers: imports and `setup_seed`, then, timed, from
creating a `TrainCtx` to the end of the first step. Fails where the slowest takes too long.
"""

from __future__ import annotations

import subprocess
import sys
import time

import click
import numpy as np
import torch

from persia.ctx import DataCtx, TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.utils import setup_seed

_BATCH = 256
_ROUND = "from benchmarks.first_step import first_step_s; print(first_step_s())"


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4 + 16, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.linear(torch.cat([*dense, *embeddings], dim=1))
        return output


def send() -> None:
    """What a data loader script does."""
    with DataCtx() as ctx:
        ctx.send_data(
            PersiaBatch(
                [IDTypeFeatureWithSingleID("user", np.arange(_BATCH, dtype=np.uint64))],
                non_id_type_features=[NonIDTypeFeature(np.ones((_BATCH, 4), np.float32))],
                labels=[Label(np.ones((_BATCH, 1), np.float32))],
                requires_grad=True,
            )
        )


def first_step_s() -> float:
    setup_seed(0)
    begin_s = time.perf_counter()
    model = Tower()
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.01),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mixed_precision=False,
        slots={"slots_config": {"user": {"dim": 16}}},
    ) as ctx:
        for batch in DataLoader(StreamingDataset(loader=send)):
            output, labels = ctx.forward(batch)
            assert labels is not None, "only inference has none"
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
            break
        return time.perf_counter() - begin_s


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--allow", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="Seconds."
)
def main(rounds: int, allow: float) -> None:
    command = [sys.executable, "-c", _ROUND]
    seconds = sorted(
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        for _ in range(rounds)
    )
    print(f"to the end of the first step: {', '.join(f'{one:.2f}' for one in seconds)} s")
    if seconds[-1] > allow:
        sys.exit(f"more than {allow:g} s")


if __name__ == "__main__":
    main()
