"""The rows of one converted weight in parameter servers, with the calls of a store in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from persia import _native
from persia.embedding.data import MAX_BATCH_SIZE
from persia.errors import FailedPreconditionError, InvalidArgumentError, PersiaError
from persia.nn.servers import Servers
from persia.pipeline.lease import BatchLease

_numbers = itertools.count(1)  # of lookups, for messages


class ServerBatch:
    """A training lookup, until its update; when it is dropped without one, the worker hears of it."""

    def __init__(
        self,
        values: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        references: list[_native.BatchReference],
        servers: Servers,
    ) -> None:
        self.values = values
        self.lengths = lengths
        self.outcome = ""  # of its update, where there was one
        self.leases = [BatchLease(next(_numbers), reference) for reference in references]
        for lease in self.leases:
            lease.watch(self, servers.reaper)


class Updated(NamedTuple):
    """The outcome of an update; servers count the rest."""

    num_nonfinite: int  # rows that were left as they were


class ServerTable:
    """One slot; thread-safe. Each call waits for the servers, at most until `PERSIA_DEADLINE_SEC`.

    A batch of more bags than a message holds is looked up in several. It is updated by its distinct IDs
    then, so that no row gets two updates.
    """

    def __init__(self, servers: Servers, slot: str, dim: int) -> None:
        self._servers = servers
        self._slot = slot
        self._dim = dim

    def configure(self, config: _native.TrainConfig, *, replace: bool = False) -> None:
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
        references = []
        try:
            for _, result in self._look_up(values, counts, train):
                pooled.append(result.slots[0].rows)
                references.append(result.reference)
        finally:  # also where a later lookup failed: the worker keeps the earlier batches until told
            batch = ServerBatch(values, counts, references if train else [], self._servers)
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
