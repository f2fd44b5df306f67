"""The same training in plain PyTorch, in one process: what the distributed run is compared with.

Model, optimizers, batch size and order of the data equal those of the pipeline; embeddings are ordinary
`nn.Embedding` tables and every update is applied before the next batch.

    python reference.py                               six seeds
    python reference.py --seeds $(seq 0 19) --delay 3
    python reference.py --holdout --recipe tuned      judged on the last fifth of training, to choose by

With a delay of N, a batch sees the embeddings as they were N updates ago, while its gradient is applied to
the present ones. That is the most that N + 1 batches in flight do while updates keep their order; in the
pipeline the delay changes from batch to batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import deque
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from dataset import DEFAULT_DIRECTORY, DataError, Split, load_info, load_split
from metrics import roc_auc
from model import DNN, EMBEDDING_DIM
from recipes import PUBLISHED, RECIPES, Recipe


class Reference:
    """The example's model with its tables in the same process; `delay` is in updates."""

    def __init__(
        self, num_categories: list[int], seed: int, delay: int = 0, recipe: Recipe = PUBLISHED
    ) -> None:
        torch.manual_seed(seed)
        self._recipe = recipe
        self._model = DNN()
        # One row more than training has categories, for values that only the test file holds.
        self._tables = nn.ModuleList(nn.Embedding(num + 1, EMBEDDING_DIM) for num in num_categories)
        for weight in self._tables.parameters():
            nn.init.uniform_(weight, -0.01, 0.01)
        self._dense_optimizer = torch.optim.SGD(self._model.parameters(), lr=recipe.dense_rate)
        self._embedding_optimizer = torch.optim.Adagrad(
            self._tables.parameters(), lr=recipe.embedding_rate, initial_accumulator_value=1e-2
        )
        # Copies of the tables before each of the last steps, the oldest of which a batch looks up in.
        self._versions: deque[list[torch.Tensor]] = deque(maxlen=delay + 1)

    def train(self, split: Split) -> None:
        """The recipe's passes over the full batches, in file order."""
        loss_function = nn.BCELoss()
        self._model.train()
        for batch in split.training_batches(self._recipe):
            self._versions.append([weight.detach().clone() for weight in self._tables.parameters()])
            # A leaf of its own for this batch: at the start, several batches use the same version.
            looked_up = [version.detach().requires_grad_() for version in self._versions[0]]
            loss = loss_function(self._forward(batch, looked_up), torch.from_numpy(batch.labels))
            self._dense_optimizer.zero_grad()
            loss.backward()
            for weight, leaf in zip(self._tables.parameters(), looked_up, strict=True):
                weight.grad = leaf.grad
            self._dense_optimizer.step()
            self._embedding_optimizer.step()

    @torch.no_grad()
    def evaluate(self, split: Split) -> float:
        """AUC over every row."""
        self._model.eval()
        return roc_auc(split.labels, self._forward(split, list(self._tables.parameters())).numpy())

    def _forward(self, split: Split, tables: list[torch.Tensor]) -> torch.Tensor:
        ids = torch.from_numpy(split.ids.astype("int64"))
        embeddings = [functional.embedding(ids[:, column], table) for column, table in enumerate(tables)]
        output: torch.Tensor = self._model([torch.from_numpy(split.dense)], embeddings)
        return output


def trained(
    directory: Path, seed: int, delay: int = 0, recipe: Recipe = PUBLISHED, *, holdout: bool = False
) -> tuple[float, float]:
    """AUC after training on the prepared data in `directory`, and samples per second in training.

    AUC on the test data; with `holdout` on the last fifth of the training data, which is then not trained on.
    """
    info, split = load_info(directory), load_split(directory, "train")
    if holdout:
        held_out_begins = len(split) * 4 // 5
        split, judge = split.part(0, held_out_begins), split.part(held_out_begins, len(split))
    else:
        judge = load_split(directory, "test")
    reference = Reference(list(info.num_categories.values()), seed, delay, recipe)
    begin_s = time.perf_counter()
    reference.train(split)
    num_samples = len(split.training_batches(recipe)) * recipe.batch_size
    rate = num_samples / (time.perf_counter() - begin_s)
    return reference.evaluate(judge), rate


def reference_auc(directory: Path, seed: int, delay: int = 0) -> float:
    """Test AUC of `trained`."""
    return trained(directory, seed, delay)[0]


def arguments_of_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help="prepared data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5], metavar="SEED")
    parser.add_argument("--delay", type=int, default=0, metavar="N", help="updates a batch does not see yet")
    parser.add_argument("--recipe", choices=RECIPES, default="published", help="batch size and rates")
    parser.add_argument("--batch-size", type=int, help="another than the recipe's, as the rates below")
    parser.add_argument("--num-passes", type=int)
    parser.add_argument("--dense-rate", type=float)
    parser.add_argument("--embedding-rate", type=float)
    parser.add_argument(
        "--holdout", action="store_true", help="train on the first four fifths of training, judge on the last"
    )
    parser.add_argument(
        "--summary", type=Path, metavar="FILE", help="AUC and speed of the last seed, as JSON"
    )
    arguments = parser.parse_args()
    if arguments.delay < 0:
        parser.error(f"--delay is {arguments.delay}: it must be at least 0")
    return arguments


def chosen_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe named, with what was given beside it."""
    names = ("batch_size", "num_passes", "dense_rate", "embedding_rate")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return dataclasses.replace(RECIPES[arguments.recipe], **given)


def main() -> int:
    arguments = arguments_of_command()
    recipe = chosen_recipe(arguments)
    try:
        info = load_info(arguments.data)
        aucs = {}
        for seed in arguments.seeds:
            aucs[seed], rate = trained(
                arguments.data, seed, arguments.delay, recipe, holdout=arguments.holdout
            )
        if arguments.summary:
            summary = {"test_auc": aucs[seed], "samples_per_second": rate}
            arguments.summary.write_text(json.dumps(summary) + "\n", encoding="utf-8")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"plain PyTorch, one process, data set: {info.dataset}, embeddings late by: {arguments.delay}")
    judged_on = "held-out" if arguments.holdout else "test"
    for seed, auc in aucs.items():
        print(f"  seed {seed}: {judged_on} AUC {auc:.7f}")
    print(f"  mean: {sum(aucs.values()) / len(aucs):.7f}, least: {min(aucs.values()):.7f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
