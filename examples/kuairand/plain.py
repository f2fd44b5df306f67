"""The same training in plain PyTorch: what the job is compared with.

    KUAIRAND_DIR=DIR python plain.py
    KUAIRAND_DIR=DIR python plain.py --delay 7       each batch sees tables as they were 7 updates ago
    KUAIRAND_DIR=DIR python plain.py --holdout       judged on the last day of training, to choose by

Data, network, optimizers and batches are those of train.py; every update is applied before the next batch,
unless a delay is asked for.
Tables need a vocabulary, so IDs are numbered first; row 0 stands for all that training does not have, and
stays zero, as an ID without a row is zero for the servers.
"""

from __future__ import annotations

import argparse
from collections import deque

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import clicks
from click_model import DIM, ClickModel
from job_settings import BATCH_SIZE, DENSE_RATE, EMBEDDING_RATE, Settings
from outcome import Throughput, describe, write_summary
from persia.nn import ClickMetrics

_HOLDOUT_BEGINS = 73_637  # the row at which the last 24 hours of the training file begin
_TEST_BATCH_SIZE = 4096
_INITIAL = 0.01  # of the servers: uniform from -0.01 to 0.01, and an accumulator of 0.01


class Tables(nn.Module):
    """One table a slot."""

    def __init__(self, log: clicks.Clicks) -> None:
        super().__init__()
        self._known: dict[str, NDArray[np.uint64]] = {
            slot: np.unique(ids) for slot, ids in (*log.ids.items(), ("watched", _flat(log)))
        }
        self.tables = nn.ModuleDict(
            {
                slot: nn.EmbeddingBag(len(known) + 1, DIM, mode="sum", sparse=True, padding_idx=0)
                for slot, known in self._known.items()
            }
        )
        for table in self.tables.values():
            nn.init.uniform_(table.weight[1:].detach(), -_INITIAL, _INITIAL)
            table.weight[0].detach().zero_()

    def forward(self, log: clicks.Clicks) -> list[torch.Tensor]:
        """float32 [rows, DIM] for each of SLOTS."""
        lengths = np.array(pc.list_value_length(log.watched).fill_null(0))
        single = torch.arange(len(log))
        ends = torch.from_numpy(np.cumsum(lengths, dtype=np.int64))
        begins = ends - torch.from_numpy(lengths)
        embeddings = [self._rows(slot, log.ids[slot], single) for slot in clicks.SINGLE_SLOTS]
        watched = self._rows("watched", _flat(log), begins)
        counts = torch.from_numpy(lengths).clamp(min=1).unsqueeze(1)
        return [*embeddings, watched / counts]

    def _rows(self, slot: str, ids: NDArray[np.uint64], begins: torch.Tensor) -> torch.Tensor:
        known = self._known[slot]
        at = np.searchsorted(known, ids).clip(max=len(known) - 1)
        rows = np.where(known[at] == ids, at + 1, 0)
        output: torch.Tensor = self.tables[slot](torch.from_numpy(rows), begins)
        return output


def _flat(log: clicks.Clicks) -> NDArray[np.uint64]:
    ids: NDArray[np.uint64] = log.watched.flatten().to_numpy().astype(np.uint64)
    return ids


def train(model: ClickModel, tables: Tables, log: clicks.Clicks, options: argparse.Namespace) -> float:
    """One pass; returns samples per second."""
    dense = torch.optim.Adam(model.parameters(), lr=options.dense_rate)
    sparse = torch.optim.Adagrad(
        tables.parameters(), lr=options.embedding_rate, initial_accumulator_value=_INITIAL
    )
    weights = list(tables.parameters())
    late: deque[list[torch.Tensor | None]] = deque()  # gradients of the last steps, not applied yet

    def apply_oldest() -> None:
        for weight, gradient in zip(weights, late.popleft(), strict=True):
            weight.grad = gradient
        sparse.step()

    throughput = Throughput()
    for part in log.batches(options.batch_size):
        logits = model([torch.from_numpy(part.seconds)], tables(part))
        dense.zero_grad()
        sparse.zero_grad()
        binary_cross_entropy_with_logits(logits, torch.from_numpy(part.clicks)).backward()
        dense.step()
        late.append([weight.grad for weight in weights])
        if len(late) > options.delay:
            apply_oldest()
        throughput.step(len(part))
    while late:
        apply_oldest()
    return throughput.overall()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=int, default=0, metavar="N", help="updates a batch does not see yet")
    parser.add_argument(
        "--holdout", action="store_true", help="train on the first 73,637 rows, judge on the rest (a day)"
    )
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--embedding-rate", type=float, default=EMBEDDING_RATE)
    parser.add_argument("--dense-rate", type=float, default=DENSE_RATE)
    return parser.parse_args()


def read(settings: Settings, holdout: bool) -> tuple[clicks.Clicks, clicks.Clicks]:
    """What is trained on, and what is judged by."""
    log = clicks.read(settings.data, clicks.TRAIN, settings.max_rows)
    if holdout:
        return log.part(0, _HOLDOUT_BEGINS), log.part(_HOLDOUT_BEGINS, len(log))
    return log, clicks.read(settings.data, clicks.TEST, settings.max_rows)


def main() -> None:
    chosen = options()
    settings = Settings.from_environment()
    torch.manual_seed(settings.seed)
    log, test = read(settings, chosen.holdout)
    model, tables = ClickModel(), Tables(log)
    samples_per_second = train(model, tables, log, chosen)
    quality = ClickMetrics(window=len(test), from_logits=True)
    with torch.no_grad():
        for part in test.batches(_TEST_BATCH_SIZE):
            quality.update(
                model([torch.from_numpy(part.seconds)], tables(part)), torch.from_numpy(part.clicks)
            )
    print(f"test: {describe(quality.compute())}", flush=True)
    write_summary(settings.output, test_auc=quality.compute().auc, samples_per_second=samples_per_second)


if __name__ == "__main__":
    main()
