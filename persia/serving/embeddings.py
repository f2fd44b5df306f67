"""Where a predictor's embeddings come from: rows in this process, or the embedding workers of a job.

Both only read. An ID without a row reads as zeros; in this process such IDs are counted here, those of remote
rows by the parameter servers that have been asked (`persia-launcher status`, their metrics).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from persia import env
from persia._native import EmbeddedClient, LookupResult
from persia.checkpoint.checkpoints import Checkpoints, Source
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.service import CheckpointService
from persia.config import SlotsConfig
from persia.errors import NotFoundError, UnavailableError
from persia.job.inference import RemoteRows
from persia.job.runtime import local_share
from persia.packets.applier import PacketApplier, clear_rows

if TYPE_CHECKING:
    from persia._native import StoreStats

__all__ = ["EmbeddedRows", "EmbeddingSource", "RemoteRows"]

# Of all models of this process.
_shared: WeakValueDictionary[str, EmbeddedRows] = WeakValueDictionary()
_loads: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()  # each held during a load
_sharing = threading.Lock()  # so that no key gets two of these locks


class EmbeddingSource(Protocol):
    """Looks ID features up. Thread-safe."""

    def lookup(self, id_features: bytes) -> LookupResult:
        """Of the wire format's "ID features". InvalidArgumentError, UnavailableError: name slot or peer."""

    def check_serving(self) -> None:
        """Returns when lookups can be answered now; UnavailableError, DeadlineExceededError otherwise."""

    @property
    def num_missing(self) -> int | None:
        """IDs read as zeros so far, duplicates of a batch once; None: others count them."""


class EmbeddedRows:
    """The rows of a checkpoint, loaded into this process."""

    def __init__(self, source: Source | None, slots: SlotsConfig, *, num_threads: int | None = None) -> None:
        """Loads everything, after all of it was checked: NotFoundError, CorruptionError.

        `source` None: there are no rows, until packets bring them.
        `num_threads` load and look up; None takes the default of the settings.
        FailedPreconditionError: `slots` are not those that the rows were trained with.
        """
        # Else the model would answer with zeros for all IDs, which looks like a bad model.
        if source is not None and not source.has_embeddings:
            raise NotFoundError(f"{source.location} has no embeddings: serve a whole checkpoint")
        self._client = EmbeddedClient(
            slots=slots.native_slots(), feature_index_prefix_bit=slots.feature_index_prefix_bit
        )
        share = local_share(self._client.store, slots, num_threads)
        self.packets = PacketApplier(share)
        if source is None:
            clear_rows(self._client.store)
        else:
            # Not a JobRuntime, which refers to itself: rows of a replaced version must be gone at once, not
            # when the garbage collector comes.
            peer = LocalPeer(CheckpointService(share))
            checkpoints = Checkpoints(lambda: [peer], deadline_s=env.get_deadline_s())
            checkpoints.load(source, with_state=False)  # weights alone: nothing trains here

    @classmethod
    def shared(cls, source: Source, slots: SlotsConfig) -> EmbeddedRows:
        """The same copy for the same rows, as long as it is in use. So nothing may change them.

        UnavailableError: they are still being loaded elsewhere.
        """
        # Checksums cover the content of the files, in which folder they ever are.
        key = repr((source.manifest.embeddings, slots))
        with _sharing:
            load = _loads.setdefault(key, threading.Lock())
        if not load.acquire(timeout=env.get_deadline_s()):
            raise UnavailableError(
                f"the rows of {source.location} are being loaded for another model, for longer than "
                f"{env.get_deadline_s():g} s (PERSIA_DEADLINE_SEC): look at that model's checkpoint"
            )
        try:
            rows = _shared.get(key)
            if rows is None:
                rows = _shared[key] = cls(source, slots)
            return rows
        finally:
            load.release()

    def stats(self) -> StoreStats:
        """Counts of the rows and their memory, also for all models that share them."""
        return self._client.store.stats()

    def lookup(self, id_features: bytes) -> LookupResult:
        """Looks up the wire format's "ID features". InvalidArgumentError names the slot."""
        # No gradients will come, so the client keeps nothing of the batch.
        return self._client.lookup_direct(0, id_features, requires_grad=False)

    def check_serving(self) -> None:
        """They are here."""

    @property
    def num_missing(self) -> int:
        """IDs read as zeros so far, duplicates of a batch once."""
        return self._client.num_missing_rows()
