"""Flags, presets and parts of the recipe: what train.py and data_loader.py share.

Flags have the names and defaults of NVIDIA's DLRM and DCNv2 examples, where those have them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from persia import optim
from persia.data import FeatureSpec, SyntheticClicks, open_batches
from persia.data.striped import of_epoch
from persia.embedding.data import PersiaBatch
from persia.errors import InvalidArgumentError
from persia.models import DLRM, DCNv2
from persia.train import Batches, Trainer, WarmupPolynomialDecay

# What differs from the defaults of the flags, which are those of Criteo 1TB.
_CONSTANT_RATE = {"warmup_steps": 0, "decay_start_step": 0, "decay_steps": 0}
# IDs of a sample in each slot of MLPerf's multi-hot data; files have theirs in the feature spec.
_MLPERF_HOTNESS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
PRESETS: dict[str, dict[str, Any]] = {
    "criteo_1tb": {},
    "criteo_kaggle": _CONSTANT_RATE
    | {"embedding_dim": 16, "bottom_mlp_sizes": [512, 256, 64, 16], "top_mlp_sizes": [512, 256, 1]}
    | {"batch_size": 128, "test_batch_size": 16384, "lr": 0.1, "evals_per_epoch": 10},
    "mlperf_dcnv2": _CONSTANT_RATE
    | {"interaction": "cross", "optimizer": "adagrad", "batch_size": 55296, "lr": 0.004}
    | {"evals_per_epoch": 20, "auc_threshold": 0.80275, "multi_hot_sizes": _MLPERF_HOTNESS},
    # Made-up clicks on Criteo's cardinalities; no files, no network.
    "laptop": {"synthetic": True, "synthetic_dataset_num_entries": 1000 * 2048}
    | {"synthetic_dataset_test_entries": 16 * 8192, "batch_size": 2048, "test_batch_size": 8192}
    | {"embedding_dim": 8, "bottom_mlp_sizes": [32, 8], "top_mlp_sizes": [64, 32, 1], "optimizer": "adam"}
    | {"lr": 0.004, "evals_per_epoch": 5, "warmup_steps": 30, "decay_start_step": 30}
    | {"decay_steps": 970, "decay_power": 1, "serve": True},
}


def parser() -> argparse.ArgumentParser:
    """All flags, without the preset's values."""
    made = argparse.ArgumentParser(description="Trains DLRM or DCNv2 on Criteo, or on made-up clicks.")
    add = made.add_argument
    add("--preset", choices=PRESETS, default="laptop")
    add(
        "--mode",
        choices=["train", "write_config", "write_data"],
        default="train",
        help="write_config: embedding_config.yml of a cluster's servers; write_data: made-up clicks as files",
    )
    add("--dataset", "--dataset_path", "--data", metavar="DIR", help="folder with a feature_spec.yaml")
    add("--feature_spec", default="feature_spec.yaml")
    add(
        "--check_data",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read every value once before training starts",
    )
    add("--seed", type=int, default=12345)
    add("--batch_size", type=int, default=65536, help="samples of a step, divided among the ranks")
    add("--test_batch_size", "--valid_batch_size", type=int, default=32768)
    add("--num_ranks", type=int, help="ranks of the job; needed by write_config and write_data only")
    add("--lr", type=float, default=24)
    add("--optimizer", choices=["sgd", "adam", "adagrad"], default="sgd", help="of dense and sparse parts")
    add("--epochs", type=int, default=1)
    add("--max_steps", type=int, help="of an epoch")
    add("--evals_per_epoch", type=int, default=1)
    add("--test_freq", type=int, help="steps between evaluations, instead of evals_per_epoch")
    add("--auc_threshold", type=float, help="stop at this AUC")
    add("--print_freq", type=int, default=200)
    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--compile", action="store_true", help="torch.compile")
    for name, kind, default in (
        *(("warmup_factor", float, 0), ("warmup_steps", int, 8000), ("decay_start_step", int, 48000)),
        *(("decay_steps", int, 24000), ("decay_power", float, 2), ("decay_end_lr", float, 0)),
    ):
        add(f"--{name}", type=kind, default=default)
    add("--interaction", "--interaction_op", choices=["dot", "cross"], default="dot", help="cross: DCNv2")
    add("--embedding_dim", type=int, default=128)
    add("--data_parallel_threshold", type=int, help="largest table in the dense model, in elements")
    add("--bottom_mlp_sizes", "--bottom_mlp_dims", type=_sizes, default=[512, 256, 128])
    add("--top_mlp_sizes", "--top_mlp_dims", type=_sizes, default=[1024, 1024, 512, 256, 1])
    add("--num_cross_layers", type=int, default=3)
    add("--cross_layer_projection_dim", type=int, default=512)
    add("--shuffle_batch_order", action="store_true")
    add("--save_checkpoint_path", metavar="DIR")
    add(
        "--serve",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="at the end, serve the model and evaluate the server's predictions; with one rank",
    )
    add("--export_path", metavar="DIR", help="at the end, write the model that persia-launcher serve reads")
    add("--embedding_staleness", type=int, default=8)
    add("--synthetic", action="store_true", help="made-up clicks with a planted model, without files")
    add("--synthetic_dataset_num_entries", type=int, default=2**25)
    add("--synthetic_dataset_test_entries", type=int, default=2**20)
    add("--synthetic_dataset_table_sizes", type=_sizes, default=None, help="default: Criteo's at limit 15")
    add("--synthetic_dataset_numerical_features", type=int, default=13)
    add("--multi_hot_sizes", type=_sizes, help="made-up IDs of a sample in each slot; default: 1")
    return made


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags: those given, else those of the preset, else the defaults."""
    made = parser()
    made.set_defaults(**PRESETS[made.parse_args(words).preset])
    flags = made.parse_args(words)
    if flags.mode == "write_data" and not flags.dataset:
        made.error("--mode write_data needs --dataset DIR, the folder to write to")
    if flags.mode == "write_data" and flags.max_steps:
        made.error(
            "--max_steps limits training, not --mode write_data: set --synthetic_dataset_num_entries to the "
            "samples to write"
        )
    if flags.dataset:
        flags.synthetic = flags.mode == "write_data"
    elif not flags.synthetic:
        made.error("--dataset DIR names the folder of the data; --synthetic makes data up")
    return flags


@dataclass(frozen=True)
class Limited:
    """The first batches of others."""

    batches: Any
    limit: int

    def __len__(self) -> int:
        return min(len(self.batches), self.limit)

    def of_epoch(self, epoch: int) -> Limited:
        """The first batches in the order of an epoch."""
        return replace(self, batches=of_epoch(self.batches, epoch))

    def read(self, first: int = 0) -> Iterator[Any]:
        for _, rows in zip(range(first, len(self)), self.batches.read(first), strict=False):
            yield rows

    def make(self, rows: Any, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
        made: PersiaBatch = self.batches.make(rows, requires_grad=requires_grad, meta=meta)
        return made


class Recipe:
    """Data, model, optimizers and trainer of the flags, as every process of the job makes them.

    Args:
        flags: those of `parse`.
        num_ranks: ranks of the job, among which a batch is divided.
    """

    def __init__(self, flags: argparse.Namespace, num_ranks: int) -> None:
        if flags.num_ranks not in (None, num_ranks):
            raise InvalidArgumentError(
                f"--num_ranks is {flags.num_ranks}, the job has {num_ranks}: leave the flag out, or start "
                f"{flags.num_ranks} ranks"
            )
        self.flags, self.num_ranks = flags, num_ranks
        self.planted: SyntheticClicks | None = None
        train, self.valid = self._synthetic() if flags.synthetic else self._files()
        self.train: Batches = Limited(train, flags.max_steps) if flags.max_steps else train

    def model(self) -> torch.nn.Module:
        """The model, with the same weights on every rank."""
        flags = self.flags
        sizes = {"bottom_mlp_sizes": flags.bottom_mlp_sizes, "top_mlp_sizes": flags.top_mlp_sizes}
        counts = len(self.spec.numerical), len(self.spec.categorical), flags.embedding_dim
        if flags.interaction == "dot":
            return DLRM(*counts, **sizes)
        rank = flags.cross_layer_projection_dim
        return DCNv2(
            *counts, **sizes, num_cross_layers=flags.num_cross_layers, cross_layer_projection_dim=rank
        )

    def slots(self) -> dict[str, Any]:
        """The embedding config."""
        slots = self.spec.slots(self.flags.embedding_dim)
        num_rows = (self.flags.data_parallel_threshold or 0) // self.flags.embedding_dim
        return {**slots, "dense_placement_threshold": num_rows} if num_rows else slots

    def optimizers(self, model: torch.nn.Module) -> tuple[Any, Any]:
        """Of embeddings and of the model."""
        flags = self.flags
        sparse = {"sgd": optim.SGD, "adam": optim.Adam, "adagrad": optim.Adagrad}[flags.optimizer]
        dense = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
        return sparse(lr=flags.lr), dense[flags.optimizer](model.parameters(), lr=flags.lr)

    def schedule(self) -> WarmupPolynomialDecay:
        """The factor of both rates."""
        flags = self.flags
        return WarmupPolynomialDecay(
            flags.warmup_steps,
            flags.warmup_factor,
            flags.decay_start_step,
            flags.decay_steps,
            flags.decay_power,
            flags.decay_end_lr / flags.lr,
        )

    def trainer(self, schedulers: Sequence[Any] = (), callbacks: Sequence[Any] = ()) -> Trainer:
        """The same in all processes; only ranks have schedulers and callbacks."""
        flags = self.flags
        steps = math.ceil(len(self.train) / self.num_ranks)
        return Trainer(
            self.train,
            self.valid,
            directory=flags.save_checkpoint_path,
            epochs=flags.epochs,
            evaluate_every=flags.test_freq or math.ceil(steps / flags.evals_per_epoch),
            target=flags.auc_threshold,
            schedulers=schedulers,
            callbacks=callbacks,
            log_every=flags.print_freq,
        )

    def _files(self) -> tuple[Any, Any]:
        flags = self.flags
        self.spec = FeatureSpec.load(Path(flags.dataset) / flags.feature_spec)
        seed = flags.seed if flags.shuffle_batch_order else None
        size = flags.batch_size // self.num_ranks
        train = open_batches(self.spec, "train", batch_size=size, shuffle_seed=seed)
        return train, open_batches(self.spec, "test", batch_size=flags.test_batch_size)

    def _synthetic(self) -> tuple[Any, Any]:
        flags = self.flags
        sizes = flags.synthetic_dataset_table_sizes
        both = []
        for seed, size, count in (
            (1, flags.batch_size // self.num_ranks, flags.synthetic_dataset_num_entries),
            (2, flags.test_batch_size, flags.synthetic_dataset_test_entries),
        ):
            both.append(
                SyntheticClicks(
                    **({"cardinalities": sizes} if sizes else {}),
                    num_batches=max(1, count // size),
                    batch_size=size,
                    num_numerical=flags.synthetic_dataset_numerical_features,
                    hotness=flags.multi_hot_sizes,
                    num_known=8,
                    strength=2.0,
                    planted_seed=flags.seed,
                    seed=flags.seed + seed,
                )
            )
        self.planted = both[1]
        self.spec = self.planted.spec(flags.dataset or ".")
        return both[0], both[1]


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]
