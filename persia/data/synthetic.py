"""Made-up clicks with power-law IDs and a planted model, whose best possible AUC is known."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.data.feature_spec import FeatureSpec
from persia.data.split_binary import SplitBinaryWriter
from persia.embedding.checks import at_least, checked_number
from persia.embedding.data import (
    MAX_BATCH_SIZE,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import InvalidArgumentError

# Of Criteo 1TB by frequency limit, as in NVIDIA's synthetic variants criteo_t15, criteo_t3 and criteo_t0.
CRITEO_CARDINALITIES: dict[int, tuple[int, ...]] = {
    15: (
        *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209, 10667),
        *(104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
    ),
    3: (
        *(45833188, 36747, 1572176, 345139, 11, 2209, 11268, 128, 4, 975, 15, 48937457, 17246, 11316796),
        *(40094537, 452104, 12607, 105, 36, 7414, 20244, 4, 7115, 1442, 63, 29275261),
    ),
    0: (
        *(227605432, 39061, 3067956, 405283, 11, 2209, 11939, 155, 4, 977, 15, 292775614, 17296, 40790948),
        *(187188510, 590152, 12974, 109, 37, 7425, 20266, 4, 7123, 1544, 64, 130229467),
    ),
}
_NUM_NUMERICAL, _ALPHA = 13, 1.45

Columns = tuple[NDArray[np.float32], list[NDArray[np.int64]], NDArray[np.float32], NDArray[np.float64]]


class SyntheticClicks:
    """Batches that exist only while they are made, in a fixed order; each depends on `seed` and its number.

    IDs follow a power law with exponent `alpha`: 0 is the most frequent one. The logit of a click is
    `bias` plus an effect of each numerical feature, plus an effect of each ID; those of several IDs are
    averaged. Only the `num_known` most frequent IDs of a slot have effects: a model sees each of them often
    enough to learn it, so that it can reach the AUC of the planted model.

    Args:
        cardinalities: of each slot; `CRITEO_CARDINALITIES` has those of Criteo 1TB.
        num_batches: batches of an epoch.
        batch_size: rows of a batch.
        seed: of rows.
        planted_seed: of the planted model: the same for training and held-out data.
        hotness: IDs of a sample in each slot; None: 1.
        alpha: exponent of the power law, at least 0; 0 makes all IDs equally frequent.
        num_numerical: numerical features, normally distributed.
        num_known: IDs of a slot that have effects.
        strength: standard deviation of the logit, about.
        bias: logit of a sample without effects; -1 makes about 30 % clicks.

    Raises:
        InvalidArgumentError: a number out of range, or a `hotness` of another length than `cardinalities`.
    """

    def __init__(
        self,
        cardinalities: Sequence[int] = CRITEO_CARDINALITIES[15],
        *,
        num_batches: int,
        batch_size: int = 4096,
        seed: int = 0,
        planted_seed: int = 0,
        hotness: Sequence[int] | None = None,
        alpha: float = _ALPHA,
        num_numerical: int = _NUM_NUMERICAL,
        num_known: int = 64,
        strength: float = 1.5,
        bias: float = -1.0,
    ) -> None:
        self.num_batches, self.batch_size = at_least(1, "num_batches", num_batches), batch_size
        if at_least(1, "batch_size", batch_size) > MAX_BATCH_SIZE:
            raise InvalidArgumentError(f"batch_size={batch_size} is above {MAX_BATCH_SIZE}: make it smaller")
        self.cardinalities = [at_least(1, "cardinalities", size) for size in cardinalities]
        self.hotness = [1] * len(self.cardinalities) if hotness is None else list(hotness)
        if len(self.hotness) != len(self.cardinalities) or not self.cardinalities:
            raise InvalidArgumentError(
                f"hotness has {len(self.hotness)} values, cardinalities {len(self.cardinalities)}: pass "
                "one a slot"
            )
        for count in self.hotness:
            at_least(1, "hotness", count)
        self.alpha = checked_number("alpha", alpha)
        if self.alpha < 0:
            raise InvalidArgumentError(f"alpha={alpha} must be at least 0")
        self.num_numerical = at_least(0, "num_numerical", num_numerical)
        self.seed, self._planted_seed, self._bias = seed, planted_seed, bias
        random = np.random.default_rng(planted_seed)
        scale = strength / (len(self.cardinalities) + self.num_numerical) ** 0.5
        self._weights = random.normal(0, scale, self.num_numerical)
        self._effects = []
        for size in self.cardinalities:
            effects = random.normal(0, scale, min(size, at_least(1, "num_known", num_known)) + 1)
            effects[-1] = 0  # of all other IDs
            if size < len(effects):
                effects = effects[:size]
            self._effects.append(effects)

    def __len__(self) -> int:
        """The number of batches."""
        return self.num_batches

    def read(self, first: int = 0) -> Iterator[int]:
        """The numbers of batch `first` and of those after it."""
        yield from range(first, self.num_batches)

    def make(self, rows: int, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
        """Batch number `rows`; slots are named `cat_0.bin` and so on, as in `FeatureSpec.make`."""
        numerical, categorical, labels, _ = self.columns(rows)
        ids: list[IDTypeFeature] = []
        for index, (values, count) in enumerate(zip(categorical, self.hotness, strict=True)):
            flat, name = values.reshape(-1).astype(np.uint64), f"cat_{index}.bin"
            if count == 1:
                ids.append(IDTypeFeatureWithSingleID(name, flat))
            else:
                offsets = np.arange(0, len(flat) + 1, count, dtype=np.uint32)
                ids.append(IDTypeFeature.from_csr(name, flat, offsets))
        dense = [NonIDTypeFeature(numerical, "dense")] if self.num_numerical else None
        label = Label(labels.reshape(-1, 1), "label")
        return PersiaBatch(ids, dense, [label], requires_grad=requires_grad, meta=meta)

    def columns(self, batch: int) -> Columns:
        """Of a batch: numerical [rows, features], IDs [rows] or [rows, hotness] of each slot, labels, logits.

        The logits are those of the planted model, float64 [rows].
        """
        random = np.random.default_rng([self.seed, batch])
        # As float16 can hold them, so that data that is written first is the same.
        numerical = random.standard_normal((self.batch_size, self.num_numerical)).astype(np.float16)
        logits = self._bias + numerical.astype(np.float64) @ self._weights
        categorical = []
        for size, count, effects in zip(self.cardinalities, self.hotness, self._effects, strict=True):
            ids = _power_law(random.random((self.batch_size, count)), size, self.alpha)
            logits += effects[np.minimum(ids, len(effects) - 1)].mean(axis=1)
            categorical.append(ids if count > 1 else ids[:, 0])
        clicked = random.random(self.batch_size) < 1 / (1 + np.exp(-logits))
        return numerical.astype(np.float32), categorical, clicked.astype(np.float32), logits

    def best_auc(self) -> float:
        """The AUC of the planted model over all batches: what no other model can exceed but by chance."""
        import torch  # which a data loader does not need

        from persia.nn import ClickMetrics

        metrics = ClickMetrics(self.num_batches * self.batch_size, from_logits=True)
        for batch in range(self.num_batches):
            _, _, labels, logits = self.columns(batch)
            metrics.update(torch.from_numpy(logits), torch.from_numpy(labels))
        return metrics.compute().auc

    def spec(self, directory: str, mappings: Sequence[str] = ("train", "test")) -> FeatureSpec:
        """The feature spec of split-binary files in `directory`."""
        return FeatureSpec.make(
            directory,
            self.cardinalities,
            num_numerical=self.num_numerical,
            hotness=self.hotness,
            alpha=self.alpha,
            mappings=mappings,
        )

    def write_split_binary(self, directory: str, mapping: str = "train") -> None:
        """Writes all batches as one mapping of the spec in `directory`."""
        with SplitBinaryWriter(self.spec(directory), mapping) as writer:
            for batch in range(self.num_batches):
                numerical, categorical, labels, _ = self.columns(batch)
                writer.write(numerical if self.num_numerical else None, categorical, labels)

    def write_parquet(self, path: str) -> None:
        """Writes all batches as a Parquet file with the columns `label`, `I1`... and `C1`..., as Criteo's."""
        from persia.data.parquet import require_pyarrow

        pa: Any = require_pyarrow()
        writer = None
        part = f"{path}.part"
        try:
            for batch in range(self.num_batches):
                numerical, categorical, labels, _ = self.columns(batch)
                arrays: dict[str, Any] = {"label": labels.astype(np.int8)}
                arrays |= {f"I{index + 1}": numerical[:, index] for index in range(self.num_numerical)}
                for index, ids in enumerate(categorical):
                    arrays[f"C{index + 1}"] = ids if ids.ndim == 1 else list(ids)
                table = pa.table(arrays)
                writer = writer or pa.parquet.ParquetWriter(part, table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()
        os.replace(part, path)


def _power_law(uniform: NDArray[np.float64], size: int, alpha: float) -> NDArray[np.int64]:
    """IDs below `size` from numbers in [0, 1): the inverse of the distribution function on [1, size + 1)."""
    top = size + 1.0
    if alpha == 1:
        drawn = top**uniform
    else:
        exponent = 1 - alpha
        drawn = (uniform * (top**exponent - 1) + 1) ** (1 / exponent)
    return np.minimum(drawn.astype(np.int64) - 1, size - 1)
