"""What a batch of a training job costs by role: rows, bytes and processor time.

Pure arithmetic over the counts of a batch; `job_plan` makes the plan of a whole job of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from persia.errors import ConfigError
from persia.validation import Positive32, Section

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]

SERVERS, WORKERS, LOADERS = "parameter_servers", "embedding_workers", "data_loaders"
RANKS, BROKER, ONE_PROCESS, LOOP = "ranks", "broker", "one_process", "loop"
# Arrays of `dim` floats beside a row's embedding: docs/configuration.md, "Rows of a slot".
_STATE_ARRAYS = {"sgd": 0, "rowwise_adagrad": 0, "adagrad": 1, "rmsprop": 1, "lion": 1} | dict.fromkeys(
    ("adam", "adamw", "adamax", "adadelta", "ftrl"), 2
)
_HAS_SCALAR = ("rowwise_adagrad", "adam", "adamw", "adamax")
_ROW_OVERHEAD_BYTES = 25.4  # index and unfilled slabs: docs/performance_engine.md, "Memory of a row"
_EXACT_IDS = 1 << 16  # more frequent IDs have a probability each, rarer ones share that of a range


class Role(Section):
    """The processes of a role; resources are those of one process."""

    count: Positive32 | None = None  # as many as memory and speed need
    cores: _Positive | None = None
    memory_gib: _Positive | None = None
    network_gbit: _Positive | None = None  # no limit
    samples_per_s: _Positive | None = None  # of the dense model, on the device of one rank


class Hosts(Section):
    """Where the processes of a job run: the file of `--hosts`."""

    machine: Role | None = None  # one that all roles share, as with `persia-launcher local`
    parameter_servers: Role = Role()
    embedding_workers: Role = Role()
    data_loaders: Role = Role()
    ranks: Role = Role()
    broker: Role = Role()

    def check(self) -> None:
        for name in (SERVERS, WORKERS, LOADERS, RANKS, BROKER):
            role: Role = getattr(self, name)
            if (role.cores is None) == (self.machine is None):
                raise ConfigError(
                    f"{name}.cores={role.cores}: give the cores of one process of each role, or those of "
                    "a machine that all roles share, alone"
                )
            if role.samples_per_s is not None and name != RANKS:
                raise ConfigError(f"{name}.samples_per_s={role.samples_per_s}: only ranks have it, remove it")
        if self.broker.count not in (None, 1):
            raise ConfigError(f"broker.count={self.broker.count} must be 1: a job has one NATS server")
        name, memory = ("machine", self.machine) if self.machine else (SERVERS, self.parameter_servers)
        if memory.memory_gib is None or memory.cores is None:
            raise ConfigError(f"{name}.memory_gib={memory.memory_gib}: give memory_gib and cores")


@dataclass(frozen=True)
class Work:
    """What a role does for one batch."""

    ids: float
    words: float  # of 4 bytes, which are read or written
    rows: float = 0.0  # distinct IDs
    new_rows: float = 0.0  # that are inserted
    num_messages: int = 1  # processes that get a share of the batch

    @property
    def units(self) -> tuple[float, ...]:
        """What each field of `RoleCost` multiplies."""
        return self.num_messages, self.ids, self.words, self.rows, self.new_rows


class RoleCost(Section):
    """Processor time of each unit of `Work`: a message, an ID, a word, a row and a new row."""

    batch_us: _Cost
    id_ns: _Cost
    word_ns: _Cost
    row_ns: _Cost = 0.0
    new_row_ns: _Cost = 0.0

    def seconds(self, work: Work) -> float:
        """Of a batch."""
        each = self.batch_us * 1e-6, *(getattr(self, f"{name}_ns") * 1e-9 for name in _PER_UNIT)
        seconds: float = sum(cost * count for cost, count in zip(each, work.units, strict=True))
        return seconds


_PER_UNIT = ("id", "word", "row", "new_row")


def _cost(
    batch_us: float, id_ns: float, word_ns: float, row_ns: float = 0.0, new_row_ns: float = 0.0
) -> RoleCost:
    return RoleCost(batch_us=batch_us, id_ns=id_ns, word_ns=word_ns, row_ns=row_ns, new_row_ns=new_row_ns)


class Constants(Section):
    """Measured costs: the file of `--constants`.

    The defaults come from `python -m benchmarks.role_costs` on one core of an AMD EPYC with AVX-512, a busy
    virtual machine.
    """

    parameter_servers: RoleCost = _cost(301, 0, 2.56, 43.9, 324)
    embedding_workers: RoleCost = _cost(1260, 0, 0.809, 79)
    data_loaders: RoleCost = _cost(1490, 0, 6.4)
    ranks: RoleCost = _cost(1790, 1.43, 0.677)  # without the thread of the loop
    broker: RoleCost = _cost(674, 0, 2.74)
    one_process: RoleCost = _cost(1600, 0, 0.663, 165, 509)  # without the thread of the loop
    loop: RoleCost = _cost(1700, 0, 0.106)  # the thread that trains, without torch's own work
    server_mib: _Cost = 70  # of a parameter server without rows


class SlotLoad(Section):
    """One slot: its rows after training, and the distinct IDs of one batch."""

    name: str
    hotness: Positive32 = 1
    rows: _Cost
    distinct: _Cost
    new: _Cost = 0  # rows that a batch inserts


class Job(Section):
    """What is trained. A batch is that of one rank."""

    batch_size: Annotated[int, Field(ge=1, le=65535)]
    dim: Annotated[int, Field(ge=1, le=65536)]
    optimizer: str = "sgd"
    row_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    num_numerical: Annotated[int, Field(ge=0)] = 13
    dense_parameters: Annotated[int, Field(ge=0)] = 0  # which ranks all-reduce
    dense_cpu_s: _Cost = 0  # processor time of the dense model for a batch
    read_cpu_s: _Cost = 0  # processor time of a data loader that reads and makes a batch
    in_flight: Positive32 = 8  # batches between lookup and update: embedding_staleness
    slots: list[SlotLoad]

    def check(self) -> None:
        if self.optimizer not in _STATE_ARRAYS:
            raise ConfigError(f"optimizer={self.optimizer!r} must be one of {', '.join(_STATE_ARRAYS)}")

    @property
    def row_bytes(self) -> float:
        """Memory of a row, with its share of index and slabs."""
        embedding = self.dim if self.row_dtype == "float32" else -(-self.dim // 2)
        floats = embedding + _STATE_ARRAYS[self.optimizer] * self.dim
        # As RowShape::Stride: whole cache lines where that costs at most 16 bytes, else whole 16 bytes.
        lines = _round_up(floats, 16)
        stride = lines if lines - floats <= 4 else _round_up(floats, 4)
        return 4 * (stride + (self.optimizer in _HAS_SCALAR)) + _ROW_OVERHEAD_BYTES

    @property
    def state_arrays(self) -> int:
        """Arrays of `dim` floats beside a row's embedding."""
        return _STATE_ARRAYS[self.optimizer]

    @property
    def num_rows(self) -> float:
        """Of all servers, at the end."""
        return sum(slot.rows for slot in self.slots)

    @property
    def num_ids(self) -> int:
        """Of a batch."""
        return self.batch_size * sum(slot.hotness for slot in self.slots)

    @property
    def num_distinct(self) -> float:
        """Rows of a batch."""
        return sum(slot.distinct for slot in self.slots)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one batch by hop, of all servers together."""

    id_features: float  # data loader to embedding worker, through the broker
    submitted: float  # data loader to rank, through the broker
    lookups: float  # embedding worker to servers
    rows: float  # servers to embedding worker
    embeddings: float  # embedding worker to rank
    gradients: float  # rank to embedding worker
    updates: float  # embedding worker to servers
    all_reduce: float  # of a rank, each way

    @classmethod
    def of(cls, job: Job, num_servers: int, num_ranks: int) -> Traffic:
        """By the layouts of docs/wire_format.md, without the headers of frames."""
        id_features, embeddings, gradients = 16.0, 24.0, 24.0
        for slot in job.slots:
            name = _round_up(len(slot.name.encode()), 8)
            id_features += 32 + name + _sent_ids(slot, job)
            sent, index = _sent_rows(slot, job)
            embeddings += 24 + name + 4 * job.dim * sent + index
            gradients += 16 + name + 4 * job.dim * sent + (8 if index else 0)
        signs, floats = 8 * job.num_distinct, 4 * job.dim * job.num_distinct
        return cls(
            id_features=id_features,
            submitted=id_features + 168 + 4 * job.batch_size * (job.num_numerical + 1),
            lookups=signs + 32 * num_servers,
            rows=floats + 24 * num_servers,
            embeddings=embeddings,
            gradients=gradients,
            updates=signs + floats + 48 * num_servers,
            all_reduce=8 * job.dense_parameters * (num_ranks - 1) / num_ranks,
        )

    def by_role(self) -> dict[str, tuple[float, float]]:
        """Bytes that the processes of a role receive and send."""
        published, asked = self.id_features + self.submitted, self.lookups + self.updates
        return {
            SERVERS: (asked, self.rows),
            WORKERS: (self.id_features + self.rows + self.gradients, asked + self.embeddings),
            LOADERS: (0.0, published),
            BROKER: (published, published),
            RANKS: (self.submitted + self.embeddings + self.all_reduce, self.gradients + self.all_reduce),
        }


def work(job: Job, traffic: Traffic, num_servers: int) -> dict[str, Work]:
    """Of a batch, by role. LOOP is the thread that trains, which is left out of RANKS and ONE_PROCESS."""
    published = (traffic.id_features + traffic.submitted) / 4
    sent = (traffic.embeddings + traffic.gradients) / 4
    new = sum(slot.new for slot in job.slots)
    stored = job.num_distinct * job.dim * (2 + job.state_arrays) + new * job.dim * (1 + job.state_arrays)
    # Pooling reads a row for each ID, and sums of gradients write one.
    pooled = {True: 0.0, False: 0.0}  # by rank, and by worker
    for slot in job.slots:
        pooled[_sent_rows(slot, job)[1] > 0] += 2.0 * job.batch_size * slot.hotness * job.dim
    ids, rows = job.num_ids, job.num_distinct
    return {
        SERVERS: Work(0, stored, rows, new, num_servers),
        WORKERS: Work(ids, sent + 2.0 * rows * job.dim + pooled[False], rows),
        RANKS: Work(ids, sent + traffic.submitted / 4 + pooled[True]),
        LOADERS: Work(ids, published),
        BROKER: Work(0, published),
        ONE_PROCESS: Work(ids, sum(pooled.values()) + stored, rows, new),
        LOOP: Work(0, 2.0 * job.batch_size * len(job.slots) * job.dim),
    }


def _sent_ids(slot: SlotLoad, job: Job) -> float:
    """Bytes of the IDs of a data loader with their offsets. IDs are taken for numbers below `rows`."""
    offsets = _round_up(4 * (job.batch_size + 1), 8) if slot.hotness > 1 else 0
    num_ids, id_bytes = slot.hotness * job.batch_size, _number_bytes(slot.rows)
    return offsets + min(
        id_bytes * num_ids, id_bytes * slot.distinct + _number_bytes(slot.distinct) * num_ids
    )


def _number_bytes(count: float) -> int:
    """Bytes of a number below `count`."""
    return max(1, math.ceil(math.log2(max(count, 2)) / 8))


def _sent_rows(slot: SlotLoad, job: Job) -> tuple[float, float]:
    """Rows between worker and rank, and bytes of their index: 0 for pooled embeddings (ADR 39)."""
    index = 16.0 + _number_bytes(slot.distinct) * slot.hotness * job.batch_size
    index += _round_up(job.batch_size, 8) if slot.hotness > 1 else 0
    if 8 * job.dim * slot.distinct + index < 8 * job.dim * job.batch_size:
        return slot.distinct, index
    return job.batch_size, 0.0


def expected_distinct(size: int, draws: float, alpha: float) -> float:
    """Different IDs among `draws` of a power law with exponent `alpha` over `size` IDs.

    The law of `SyntheticClicks`: the probability of ID k is the integral of x^-alpha from k + 1 to k + 2.
    """
    edges = np.arange(1, min(size, _EXACT_IDS) + 2, dtype=np.float64)
    if size > _EXACT_IDS:
        edges = np.concatenate([edges, np.geomspace(edges[-1], size + 1, 1000)[1:]])
    mass = np.log(edges) if alpha == 1 else edges ** (1 - alpha) / (1 - alpha)
    counts = np.diff(edges)
    probability = np.diff(mass) / (mass[-1] - mass[0]) / counts
    return float(np.sum(counts * -np.expm1(draws * np.log1p(-np.minimum(probability, 1 - 1e-12)))))


def grown(seen: float, seen_of_half: float, factor: float, bound: float) -> float:
    """Different IDs in `factor` times as much data, by the power law through a sample and its half."""
    exponent = math.log2(max(seen, 1) / max(seen_of_half, 1))
    return float(min(bound, seen * max(factor, 1.0) ** exponent))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
