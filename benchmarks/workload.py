"""The traffic that every side gets: skewed 64-bit IDs over the vocabularies of Criteo Kaggle.

An ID's rank within its slot follows a bounded Zipf law, so a few IDs are in nearly every batch and most are
rare. IDs are ranks hashed to 64 bits, so neither their order nor their size tells how frequent they are.
Batches are made once, kept in files, and shared by both sides of a comparison; no system makes its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CRITEO_KAGGLE_CARDINALITIES",
    "Batch",
    "Fill",
    "FreshIds",
    "Workload",
    "hash_ranks",
    "load_batches",
    "make_batches",
    "resident_batches",
    "resident_ids",
    "row_numbers",
    "save_batches",
    "zipf_ranks",
]

CRITEO_KAGGLE_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
    5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of the 26 categorical columns: 33.8 million."""

Fill = Literal["arrival", "random"]
"""The order in which IDs get their rows before the clock starts; see `resident_ids`."""

NUM_DENSE_FEATURES = 13
_SLOT_SHIFT = 40  # an ID before hashing: slot above, rank below; no vocabulary reaches 2^40
_FILL_BATCH = 1024
_FRESH_SLOT = 1 << 20  # the "slot" of IDs that occur once, above all real ones


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a stream of batches looks like.

    Args:
        cardinalities: vocabulary size of each slot.
        batch_size: samples a batch.
        num_batches: batches made; they are cycled, so that the rows they touch are warm.
        mean_ids: None for exactly one ID per sample and slot, else the mean of a Poisson law.
        exponent: of the Zipf law.
        new_share: share of each batch's IDs replaced by IDs that never occurred before.
        seed: of everything random.
    """

    cardinalities: tuple[int, ...] = CRITEO_KAGGLE_CARDINALITIES
    batch_size: int = 4096
    num_batches: int = 32
    mean_ids: float | None = None
    exponent: float = 1.1
    new_share: float = 0.0
    seed: int = 1

    @property
    def num_slots(self) -> int:
        return len(self.cardinalities)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch, feature-major: all IDs of slot 0, sample by sample, then those of slot 1, and so on.

    `values` is int64 [total] (the bits of a uint64 ID), `lengths` int64 [num_slots, batch_size], `dense`
    float32 [batch_size, 13], `labels` float32 [batch_size, 1] of zeros and ones.
    """

    values: NDArray[np.int64]
    lengths: NDArray[np.int64]
    dense: NDArray[np.float32]
    labels: NDArray[np.float32]

    @property
    def num_ids(self) -> int:
        return self.values.size


def zipf_ranks(
    random: np.random.Generator, cardinality: int, exponent: float, size: int
) -> NDArray[np.uint64]:
    """`size` ranks in [0, cardinality) of a bounded Zipf law with `exponent` > 1.

    Inverts the integral of the density x ** -exponent over [1, cardinality + 1): rank r gets the mass between
    r + 1 and r + 2. This needs no table, and is a little flatter at the head than the sum over integers.
    """
    power = 1.0 - exponent
    mass = (cardinality + 1.0) ** power - 1.0
    ranks = (1.0 + random.random(size) * mass) ** (1.0 / power) - 1.0
    # Rounding may reach the bound.
    clipped: NDArray[np.uint64] = np.minimum(ranks.astype(np.uint64), np.uint64(cardinality - 1))
    return clipped


def hash_ranks(slot: int, ranks: NDArray[np.uint64]) -> NDArray[np.int64]:
    """64-bit IDs of `ranks` in `slot`: SplitMix64, a bijection, so that distinct ranks get distinct IDs."""
    bits = ranks + np.uint64(slot << _SLOT_SHIFT) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    ids: NDArray[np.int64] = (bits ^ (bits >> np.uint64(31))).view(np.int64)
    return ids


def row_numbers(batch: Batch, num_rows: tuple[int, ...]) -> NDArray[np.int64]:
    """What array-backed systems get instead of IDs: ID mod the rows of its slot's table; int64 [total]."""
    divisors = np.repeat(np.array(num_rows, np.uint64), batch.lengths.sum(axis=1))
    rows: NDArray[np.int64] = (batch.values.view(np.uint64) % divisors).astype(np.int64)
    return rows


def make_batches(workload: Workload) -> list[Batch]:
    """All batches of `workload` without new IDs (`FreshIds` adds those)."""
    random = np.random.default_rng(workload.seed)
    shape = (workload.num_batches, workload.batch_size)
    lengths, ids = [], []
    for slot, cardinality in enumerate(workload.cardinalities):
        if workload.mean_ids is None:
            slot_lengths = np.ones(shape, np.int64)
        else:
            slot_lengths = random.poisson(workload.mean_ids, shape)
        totals = slot_lengths.sum(axis=1)
        ranks = zipf_ranks(random, cardinality, workload.exponent, int(totals.sum()))
        lengths.append(slot_lengths)
        ids.append(np.split(hash_ranks(slot, ranks), np.cumsum(totals)[:-1]))
    return [
        Batch(
            values=np.concatenate([slot_ids[index] for slot_ids in ids]),
            lengths=np.stack([slot_lengths[index] for slot_lengths in lengths]),
            dense=random.standard_normal((workload.batch_size, NUM_DENSE_FEATURES), np.float32),
            labels=(random.random((workload.batch_size, 1)) < 0.25).astype(np.float32),
        )
        for index in range(workload.num_batches)
    ]


def save_batches(batches: list[Batch], folder: Path) -> None:
    """Writes one .npz file per batch into `folder`, which is made."""
    folder.mkdir(parents=True)
    for index, batch in enumerate(batches):
        with (folder / f"{index:04d}.npz").open("wb") as file:
            np.savez(file, **{field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)})


def load_batches(folder: Path) -> list[Batch]:
    """The batches that `save_batches` wrote.

    Raises:
        FileNotFoundError: there are none.
    """
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no batches: call save_batches first")
    batches = []
    for path in paths:
        with np.load(path) as arrays:
            batches.append(Batch(**arrays))
    return batches


def resident_ids(slot: int, num_rows: int, workload: Workload, fill: Fill = "arrival") -> NDArray[np.int64]:
    """The IDs of the `num_rows` most frequent ranks of `slot`, int64 [num_rows], each once.

    "arrival" is the order in which independent draws of the workload's law bring them for the first time, so
    that frequent IDs get neighbouring rows, as in a table that has grown with its traffic. If draws come at
    the times of a Poisson process, an ID of probability p first comes after a time that is exponential with
    rate p, independently of all others: sorting such times is exact, and no draw need be made.

    "random" puts frequent IDs anywhere, as hashing does to the rows of dense arrays.
    """
    random = np.random.default_rng((workload.seed, slot))
    if fill == "random":
        return hash_ranks(slot, random.permutation(num_rows).astype(np.uint64))
    power = 1.0 - workload.exponent
    ends = np.arange(1, num_rows + 2, dtype=np.float64) ** power
    arrivals = random.standard_exponential(num_rows) / (ends[:-1] - ends[1:])
    return hash_ranks(slot, np.argsort(arrivals).astype(np.uint64))


def resident_batches(
    table_rows: tuple[int, ...], workload: Workload, fill: Fill = "arrival", most_ids: int = 1 << 13
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """All resident IDs of all slots as (values [total], lengths [num_slots, 1024]), at most `most_ids` at a
    time and those of one slot, for a system that inserts what it looks up. Small, so that no buffer grows
    beyond what ordinary batches need.
    """
    for slot, num_rows in enumerate(table_rows):
        ids = resident_ids(slot, num_rows, workload, fill)
        for begin in range(0, num_rows, most_ids):
            values = ids[begin : begin + most_ids]
            lengths = np.zeros((len(table_rows), _FILL_BATCH), np.int64)
            lengths[slot] = values.size // _FILL_BATCH
            lengths[slot, : values.size % _FILL_BATCH] += 1
            yield values, lengths


class FreshIds:
    """Replaces a fixed share of a batch's IDs with IDs that no batch has had before."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = np.random.default_rng(seed)
        self._next = 0

    def renew(self, batch: Batch) -> Batch:
        """A copy of `batch` with new IDs in random places."""
        values = batch.values.copy()
        count = round(self._share * values.size)
        places = self._random.choice(values.size, count, replace=False)
        ranks = np.arange(self._next, self._next + count, dtype=np.uint64)
        self._next += count
        values[places] = hash_ranks(_FRESH_SLOT, ranks)
        return dataclasses.replace(batch, values=values)
