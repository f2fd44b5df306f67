"""What is measured: cases, and the comparisons of two cases that make up the table, with their floors."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from benchmarks.workload import CRITEO_KAGGLE_CARDINALITIES, Fill, Workload

__all__ = ["Case", "Comparison", "comparisons", "filled", "quick", "select"]

Work = Literal["train", "lookup", "mlp"]
Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]

STATE_FLOATS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 0, "adam": 2}
"""Optimizer state in floats per element of a row; row-wise Adagrad has one float a row."""

LEARNING_RATE = 1e-2
MLP_WIDTHS = (256, 128)  # of the dense part of `mlp` cases, which Adam trains with this learning rate:
DENSE_LEARNING_RATE = 1e-3

_MAX_TABLE_ROWS = {64: 2_000_000, 128: 1_000_000}  # by dim, so that every system's tables fit in memory
_MULTI_HOT = Workload(
    cardinalities=tuple(sorted(CRITEO_KAGGLE_CARDINALITIES)[-8:]), num_batches=8, mean_ids=20.0
)
_TRAFFIC_ROWS = 1_000_000  # rows that the traffic of the size curve touches, whatever the table's size
_NUM_SLOTS = 26


@dataclasses.dataclass(frozen=True)
class Case:
    """One system doing one kind of work; all fields go to the child process as JSON.

    Args:
        system: a name of `benchmarks.systems.SYSTEMS`.
        work: "train" is lookup, pooling, backward with a constant gradient, and update; "lookup" the pooled
            lookup alone, inserting nothing; "mlp" trains embeddings and a small dense model end to end.
        optimizer: of the embeddings.
        dim: of every slot.
        workload: the traffic.
        table_rows: rows of each slot that are there before the clock starts: the arrays' sizes, or what a
            hash table is filled with.
        threads: of the system, on as many cores.
        capacity: rows at which a system that evicts must do so; None for no bound.
        fill: the order in which a hash table gets these rows; arrays lie as IDs are hashed.
        in_flight: batches of a cluster that are under way at a time, as `embedding_staleness` bounds them.
    """

    system: str
    work: Work
    optimizer: Optimizer
    dim: int
    workload: Workload
    table_rows: tuple[int, ...]
    threads: int = 1
    capacity: int | None = None
    fill: Fill = "arrival"
    in_flight: int = 1

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Case:
        workload = dict(fields["workload"])
        workload["cardinalities"] = tuple(workload["cardinalities"])
        return Case(
            **{
                **fields,
                "workload": Workload(**workload),
                "table_rows": tuple(fields["table_rows"]),
            }
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two cases, measured in turns. `floor` is the least ratio ours / theirs; None where none is set.

    Args:
        name: path-like, unique, what `--only` matches.
        unit: "IDs/s" or "samples/s".
        x: the place on its curve's axis; curves are the comparisons that share `name` up to the last part.
    """

    name: str
    ours: Case
    theirs: Case
    floor: float | None = None
    unit: Literal["IDs/s", "samples/s"] = "IDs/s"
    x: float = 0.0


def _table_rows(workload: Workload, dim: int) -> tuple[int, ...]:
    most = _MAX_TABLE_ROWS.get(dim)
    return tuple(min(rows, most or rows) for rows in workload.cardinalities)


def _versus(
    name: str,
    peer: str,
    work: Work,
    optimizer: Optimizer,
    dim: int,
    floor: float | None = None,
    *,
    workload: Workload | None = None,
    unit: Literal["IDs/s", "samples/s"] = "IDs/s",
    x: float | None = None,
    system: str = "persia",
) -> Comparison:
    workload = workload or Workload()
    ours = Case(system, work, optimizer, dim, workload, _table_rows(workload, dim))
    return Comparison(
        name=f"{name}/{peer}/{dim if x is None else x:g}",
        ours=ours,
        theirs=dataclasses.replace(ours, system=peer),
        floor=floor,
        unit=unit,
        x=dim if x is None else x,
    )


def _against_arrays() -> Iterable[Comparison]:
    """fbgemm is the fastest peer where it has the optimizer; of plain torch both layouts run."""
    dims = (16, 64, 128)
    floors: dict[Optimizer, tuple[float, ...]] = {
        "adagrad": (2.5, 1.7, 1.6),
        "rowwise_adagrad": (1.1, 1.0, 1.0),
    }
    for optimizer in floors:
        for dim, floor in zip(dims, floors[optimizer], strict=True):
            yield _versus(f"train/{optimizer}", "fbgemm", "train", optimizer, dim, floor)
    for dim in dims:
        for peer in ("torch-tables", "torch-fused"):
            yield _versus("train/adam", peer, "train", "adam", dim, 4.0)
    for dim in dims:
        yield _versus("train/sgd", "fbgemm", "train", "sgd", dim)
        for peer in ("torch-tables", "torch-fused", "torchrec"):
            yield _versus("train/adagrad", peer, "train", "adagrad", dim)


def _against_hash_table() -> Iterable[Comparison]:
    optimizers: tuple[Optimizer, ...] = ("adagrad", "adam")
    for optimizer in optimizers:
        for dim, floor in ((16, 4.0), (64, 3.0), (128, 3.0)):
            yield _versus(f"train/{optimizer}", "tfra", "train", optimizer, dim, floor)


def _other_work() -> Iterable[Comparison]:
    optimizers: tuple[Optimizer, ...] = ("adagrad", "rowwise_adagrad")
    for optimizer, floors in zip(optimizers, ((1.5, 1.7), (0.8, 0.9)), strict=True):
        for dim, floor in zip((16, 64), floors, strict=True):
            name = f"multi-hot/{optimizer}"
            yield _versus(name, "fbgemm", "train", optimizer, dim, floor, workload=_MULTI_HOT)
    for dim in (16, 64):
        yield _versus("multi-hot/lookup", "fbgemm", "lookup", "adagrad", dim, 0.6, workload=_MULTI_HOT)
    yield _versus("lookup", "fbgemm", "lookup", "adagrad", 16, 0.6)
    yield _versus("lookup", "tfra", "lookup", "adagrad", 16, 4.0)
    for dim in (64, 128):
        yield _versus("lookup", "fbgemm", "lookup", "adagrad", dim, 0.85)
    yield _versus("mlp", "fbgemm", "mlp", "adagrad", 16, 1.1, unit="samples/s")
    for peer in ("torch-tables", "torch-fused", "torchrec", "tfra"):
        yield _versus("mlp", peer, "mlp", "adagrad", 16, unit="samples/s")
    for batch_size, least in ((64, 2.0), (512, 2.0), (4096, None), (16384, None)):
        workload = Workload(batch_size=batch_size, num_batches=32 * 4096 // batch_size)
        yield _versus(
            "batch-size/adagrad", "fbgemm", "train", "adagrad", 16, least, workload=workload, x=batch_size
        )


def _by_id() -> Iterable[Comparison]:
    """Slots with `index: array`; fbgemm has the same rows at the same places."""
    multi_hot = (("array", Workload()), ("array-multi-hot", _MULTI_HOT))
    for name, workload in multi_hot:
        for dim in (16, 64):
            for optimizer in ("adagrad", "rowwise_adagrad"):
                yield _versus(
                    f"{name}/{optimizer}", "fbgemm", "train", optimizer, dim, 1.1,
                    workload=workload, system="persia-arrays",
                )  # fmt: skip
            yield _versus(
                f"{name}/lookup", "fbgemm", "lookup", "adagrad", dim, 0.95,
                workload=workload, system="persia-arrays",
            )  # fmt: skip
    works: tuple[Work, ...] = ("train", "lookup")
    for work in works:
        yield _versus(
            f"array-multi-hot-to-hash/{work}", "persia", work, "rowwise_adagrad", 16,
            workload=_MULTI_HOT, system="persia-arrays",
        )  # fmt: skip


def _small() -> Iterable[Comparison]:
    """Small batches and narrow rows."""
    for batch_size in (64, 512):
        workload = Workload(batch_size=batch_size, num_batches=32 * 4096 // batch_size)
        yield _versus(
            "batch-size/lookup", "fbgemm", "lookup", "adagrad", 16, 1.0, workload=workload, x=batch_size
        )
    for dim in (4, 8):
        yield _versus("narrow/adagrad", "fbgemm", "train", "adagrad", dim)
        yield _versus("narrow/rowwise_adagrad", "fbgemm", "train", "rowwise_adagrad", dim)
        yield _versus("narrow/lookup", "fbgemm", "lookup", "adagrad", dim)


def _against_ourselves() -> Iterable[Comparison]:
    """Threads, table sizes, eviction, and the cluster: ours against ours under easier conditions."""
    for dim, floor in ((16, 1.7), (64, None), (128, None)):
        one = _versus("", "persia", "train", "adagrad", dim).ours
        yield Comparison(f"threads/1-to-2/{dim}", dataclasses.replace(one, threads=2), one, floor, x=dim)

    traffic = Workload(cardinalities=(_TRAFFIC_ROWS // _NUM_SLOTS,) * _NUM_SLOTS)
    sizes = [
        Case("persia", "train", "adagrad", 8, traffic, (rows // _NUM_SLOTS,) * _NUM_SLOTS)
        for rows in (1_000_000, 3_000_000, 10_000_000, 25_000_000, 50_000_000)
    ]
    for case in sizes[1:]:
        rows = sum(case.table_rows)
        yield Comparison(f"rows/1M-to/{rows / 1e6:.0f}M", case, sizes[0], 0.75, x=rows)

    table_rows = tuple(min(rows, 100_000) for rows in CRITEO_KAGGLE_CARDINALITIES)
    growing = Case("persia", "train", "adagrad", 16, Workload(new_share=0.3), table_rows)
    evicting = dataclasses.replace(growing, capacity=sum(table_rows))
    yield Comparison("eviction/30%-new/16", evicting, growing, 0.7, x=16)
    # Without new IDs there are also fewer distinct rows and no insertions: shown, not judged.
    steady = dataclasses.replace(growing, workload=Workload())
    yield Comparison("eviction/30%-new-to-none/16", evicting, steady, x=16)

    embedded = dataclasses.replace(growing, workload=Workload(), threads=2)
    cluster = dataclasses.replace(embedded, system="persia-cluster")
    yield Comparison("cluster/worker-and-2-servers/16", cluster, embedded, 0.5, x=16)
    overlapping = dataclasses.replace(cluster, in_flight=2)  # which keeps two cores busy
    yield Comparison("cluster/2-in-flight/16", overlapping, embedded, 0.5, x=16)


def comparisons() -> list[Comparison]:
    """The whole table, rows with floors first within each group."""
    return [
        *_against_arrays(),
        *_against_hash_table(),
        *_other_work(),
        *_by_id(),
        *_small(),
        *_against_ourselves(),
    ]


def filled(rows: Iterable[Comparison], fill: Fill) -> list[Comparison]:
    """`rows` with all their tables filled in that order."""
    return [
        dataclasses.replace(
            row,
            ours=dataclasses.replace(row.ours, fill=fill),
            theirs=dataclasses.replace(row.theirs, fill=fill),
        )
        for row in rows
    ]


def select(rows: Sequence[Comparison], patterns: Sequence[str]) -> list[Comparison]:
    """Rows whose name matches any of the glob `patterns`; all of them for no pattern.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in rows):
            raise ValueError(f"--only {pattern!r} matches no comparison: see --list")
    if not patterns:
        return list(rows)
    return [row for row in rows if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]


_QUICK = (
    "train/adagrad/fbgemm/16",
    "train/adam/torch-fused/16",
    "train/adagrad/torchrec/16",
    "train/adagrad/tfra/16",
    "multi-hot/adagrad/fbgemm/16",
    "lookup/fbgemm/16",
    "mlp/torch-tables/16",
    "threads/1-to-2/16",
    "eviction/30%-new/16",
    "cluster/worker-and-2-servers/16",
)
"""Each system and each kind of work at least once."""


def quick(rows: Sequence[Comparison], most_rows: int = 20_000) -> list[Comparison]:
    """A few of `rows` with tables of at most `most_rows` a slot, two batches, and no floors.

    It shows that everything runs; its figures mean nothing.
    """

    def shrink(case: Case) -> Case:
        table_rows = tuple(min(rows, most_rows) for rows in case.table_rows)
        return dataclasses.replace(
            case,
            workload=dataclasses.replace(case.workload, num_batches=2),
            table_rows=table_rows,
            capacity=None if case.capacity is None else sum(table_rows),
        )

    return [
        dataclasses.replace(row, ours=shrink(row.ours), theirs=shrink(row.theirs), floor=None)
        for row in rows
        if row.name in _QUICK
    ]
