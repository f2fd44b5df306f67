"""A job's parameter servers as the home of a converted model's rows, for an ordinary training loop.

Contexts own the loop of a job, look ahead, and return gradients behind its back. An ordinary loop does none
of this: each lookup waits for its rows, and `backward()` until the servers have applied the gradients.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from persia import _native, env
from persia._native import TrainConfig
from persia.checkpoint.checkpoints import DumpRequest, Source
from persia.config import SlotsConfig
from persia.embedding.data import MAX_BATCH_SIZE
from persia.errors import FailedPreconditionError, InvalidArgumentError, PersiaError
from persia.job.embedded import SlotsSource, read_slots
from persia.job.runtime import JobRuntime
from persia.logger import get_default_logger
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.counters import Counters, CounterValues
from persia.pipeline.lookup import BatchLease, LeaseReaper

_CLOSE_S = 10.0  # for giving up lookups that never got a gradient
_numbers = itertools.count(1)  # of lookups, for messages


@contextlib.contextmanager
def job_servers(slots: SlotsSource | None = None) -> Iterator[Servers | None]:
    """The servers of the job that this process belongs to, for `convert(servers=...)`.

    None without PERSIA_NATS_URL, or with PERSIA_EMBEDDED=1: `convert` then keeps rows in this process, and
    the same script runs without a job.

    Args:
        slots: the job's slots, as a file, its contents, or a `persia.config.SlotsConfig`; None: those of
            PERSIA_EMBEDDING_CONFIG. `slots_for(model)` has what a model needs.

    Raises:
        FailedPreconditionError: no slots are named, or the workers have others.
        DeadlineExceededError, UnavailableError: broker or embedding workers do not answer.
    """
    # None and no error: one script serves both ways.
    if env.get_nats_url() is None or env.embedded():
        get_default_logger().info("no servers: a converted model's rows will be in this process")
        yield None
        return
    config = read_slots(slots)
    if config is None:
        raise FailedPreconditionError(
            "the job's slots are not known: pass slots= to job_servers, or set PERSIA_EMBEDDING_CONFIG"
        )
    servers = Servers(config)
    try:
        yield servers
    finally:
        servers.close()


class Servers:
    """The parameter servers of a job with these `slots`; `job_servers` makes it, for its block."""

    def __init__(self, slots: SlotsConfig) -> None:
        self.slots = slots
        self.counters = Counters()
        self._configured = b""
        # Named apart from NN workers in the logs of the broker: it takes no batches of loaders.
        self._runtime = JobRuntime.connect(f"converted-model-{env.get_rank() or 0}", slots)
        self._is_closed = False
        self.reaper = LeaseReaper(self._runtime.backend, self.counters)

    @property
    def backend(self) -> EmbeddingBackend:
        """What looks rows up. Raises FailedPreconditionError after the block of `job_servers`."""
        if self._is_closed:
            raise FailedPreconditionError(
                "the connection to the servers is closed: use the converted model inside the block of "
                "job_servers()"
            )
        return self._runtime.backend

    @property
    def counts(self) -> CounterValues:
        """What became of the lookups made here so far."""
        return self.counters.snapshot()

    def check(self, dims: Mapping[str, int]) -> None:
        """That there is a slot for each weight, named as its module, of its dim, with rows of its own.

        Raises InvalidArgumentError naming the slot, and what to write in the embedding config.
        """
        numbers = self.slots.group_numbers()
        owners: dict[int, str] = {}
        for name, dim in dims.items():
            if reason := self._reason_against(name, dim):
                raise InvalidArgumentError(
                    f"the embedding config {reason}: write slots_config.{name} with dim: {dim} and nothing "
                    "else (persia.nn.slots_for has all of a model's), or leave the module out by select="
                )
            # Slots of a group share rows: what one weight learns would overwrite the other.
            other = owners.setdefault(numbers[name], name)
            if other != name:
                raise InvalidArgumentError(
                    f"the embedding config has the slots {other!r} and {name!r} in one feature group, where "
                    "their rows would be the same, but their weights are two: take them out of it"
                )

    def _reason_against(self, name: str, dim: int) -> str:
        # Each row of a weight must be one row of the slot, and a lookup must return it as it is.
        slot = self.slots.slots_config.get(name)
        if slot is None:
            return f"has no slot {name!r}"
        if slot.dim != dim:
            return f"has the slot {name!r} with dim={slot.dim}"
        if not slot.embedding_summation or slot.sqrt_scaling or slot.mean_scaling:
            return f"has the slot {name!r} pooled by something else than a plain sum"
        if slot.hash_stack is not None:
            return f"has the slot {name!r} with a hash stack, where IDs have no row of their own"
        if (slot.admit_after or 1) > 1:
            return (
                f"has the slot {name!r} with admit_after={slot.admit_after}, which would count the lookups "
                "that updates repeat, too"
            )
        return ""

    def check_train_config(self, config: TrainConfig) -> None:
        """That rows which are here already would not get another one: a job has one for all rows."""
        if self._configured not in (b"", config.encode()):
            raise InvalidArgumentError(
                "the servers have rows of an earlier convert() with another optimizer or embedding_config, "
                "and a job has one for all of its rows: pass the same here; slots can have their own in the "
                "embedding config (slots_config.<slot>.optimizer)"
            )

    def configure(self, config: TrainConfig) -> None:
        """Gives all servers their training config, unless they have it from here already."""
        encoded = config.encode()
        # Each converted weight calls this with the same config, and a call reaches all servers.
        if encoded != self._configured:
            self.backend.configure(config, replace=True)
            self._configured = encoded

    def dump(
        self, url: str | os.PathLike[str], *, step: int | None = None, keep_last: int | None = None
    ) -> None:
        """Writes all rows of all servers to a directory or URL that they reach (docs/checkpoints.md).

        One rank calls it. Raises what a dump of a context does.
        """
        self._runtime.checkpoints.dump(DumpRequest(url, step=step, keep_last=keep_last))

    def load(self, url: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Replaces all rows of all servers by those of a checkpoint. One rank calls it, after `convert`.

        Other ranks must not look up before it is done: let them wait, as by `torch.distributed.barrier()`.
        """
        self._runtime.checkpoints.load(Source(url), strict=strict)

    def close(self) -> None:
        """Gives up lookups that got no gradient, and disconnects; idempotent."""
        # First: an update that another thread begins now must not find a reaper that has ended.
        self._is_closed = True
        self.reaper.close(min(_CLOSE_S, env.get_deadline_s()))
        self._runtime.close(_CLOSE_S)


@dataclass(eq=False)  # watched by its leases: known by its identity
class ServerBatch:
    """A training lookup, until its update; when it is dropped without one, the worker hears of it."""

    values: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    leases: list[BatchLease]
    outcome: str = ""  # of its update, where there was one


class Updated(NamedTuple):
    """The outcome of an update; servers count the rest."""

    num_nonfinite: int  # rows that were left as they were


class ServerTable:
    """The rows of one converted weight in a slot, with the calls of a store in this process. Thread-safe.

    Each call waits for the servers, at most until `PERSIA_DEADLINE_SEC`.

    A batch of more bags than a message holds is looked up in several. It is updated by its distinct IDs
    then, so that no row gets two updates.
    """

    def __init__(self, servers: Servers, slot: str, dim: int) -> None:
        self._servers = servers
        self._slot = slot
        self._dim = dim

    def configure(self, config: TrainConfig, *, replace: bool = False) -> None:
        self._servers.configure(config)

    def lookup(
        self,
        values: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        *,
        train: bool,
        weights: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.float32], ServerBatch]:
        if weights is not None:
            raise InvalidArgumentError(f"{self._slot!r}: rows in servers are summed without weights")
        # One slot: a converted weight is a collection of its own.
        counts = lengths[0]
        pooled = [np.empty((0, self._dim), np.float32)]
        leases = []
        try:
            for _, result in self._look_up(values, counts, train):
                pooled.append(result.slots[0].rows)
                if train:
                    leases.append(BatchLease(next(_numbers), result.reference))
        finally:  # also where a later lookup failed: the worker keeps the earlier batches until told
            batch = ServerBatch(values, counts, leases)
            for lease in leases:
                lease.watch(batch, self._servers.reaper)
        return pooled[1] if len(pooled) == 2 else np.concatenate(pooled), batch

    def update(self, batch: ServerBatch, gradients: NDArray[np.float32]) -> Updated:
        """Returns when the servers have applied the gradients. Raises what kept them from it."""
        if batch.outcome:
            raise FailedPreconditionError(f"the rows of this batch {batch.outcome}")
        batch.outcome = "were not, or only partly, updated by a backward that failed: look them up again"
        if len(batch.leases) == 1:
            updated = self._return(batch.leases[0], gradients)
        else:
            # One ID may be in several of the lookups, and an update for each would step its optimizer twice.
            for lease in batch.leases:
                self._servers.reaper.reap(lease)
            updated = self._update_distinct(batch, gradients)
        batch.outcome = "have been updated already: add up the losses and call backward once"
        return updated

    def set_rows(self, slot: int, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        self._servers.backend.set_slot_rows(self._servers.slots, self._slot, ids, rows)

    def stats(self) -> NoReturn:
        raise FailedPreconditionError(
            f"the rows of {self._slot!r} are in parameter servers, which count for all slots together: see "
            "`persia-launcher status`"
        )

    def clear(self) -> NoReturn:
        raise FailedPreconditionError(
            f"the rows of {self._slot!r} are in parameter servers, beside those of other slots: start new "
            "servers, or set the rows anew"
        )

    def _look_up(
        self, values: NDArray[np.uint64], counts: NDArray[np.int64], train: bool
    ) -> Iterator[tuple[slice, _native.LookupResult]]:
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        for begin in range(0, len(counts), MAX_BATCH_SIZE):
            bags = slice(begin, min(len(counts), begin + MAX_BATCH_SIZE))
            first, last = ends[bags.start], ends[bags.stop]
            offsets = (ends[bags.start : bags.stop + 1] - first).astype(np.uint32)
            message = _native.encode_id_features(
                bags.stop - bags.start, [(self._slot, values[first:last], offsets)]
            )
            yield bags, self._servers.backend.lookup_direct(message, requires_grad=train)

    def _update_distinct(self, batch: ServerBatch, gradients: NDArray[np.float32]) -> Updated:
        # Sums over equal IDs are in the order of the batch, so they do not depend on how it was divided.
        ids, number_of = np.unique(batch.values, return_inverse=True)
        bag_of = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        per_id = torch.from_numpy(gradients)[torch.from_numpy(bag_of)]
        sums = torch.zeros(len(ids), self._dim).index_add_(0, torch.from_numpy(number_of), per_id).numpy()
        num_nonfinite = 0
        for rows, result in self._look_up(ids, np.ones(len(ids), np.int64), train=True):
            lease = BatchLease(next(_numbers), result.reference)
            num_nonfinite += self._return(lease, sums[rows]).num_nonfinite
        return Updated(num_nonfinite)

    def _return(self, lease: BatchLease, gradients: NDArray[np.float32]) -> Updated:
        lease.acquire()
        try:
            report = self._servers.backend.return_gradients(
                lease.reference, [(self._slot, gradients)], scale=1.0
            )
        except BaseException as failure:  # also what a signal's handler raised
            lease.give_back()
            self._servers.reaper.reap(lease)
            if not isinstance(failure, PersiaError):
                raise
            raise type(failure)(
                f"the rows of {self._slot!r} were not, or only partly, updated: {failure}"
            ) from failure
        lease.release()
        self._servers.counters.applied(report)
        # Workers leave out a slot whose gradient is not finite, with all its rows.
        return Updated(len(gradients) if report.num_nonfinite_slots else 0)
