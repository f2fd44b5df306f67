"""consistency="exact": lookups ahead of updates, with the results of synchronous training (docs/adr/0054).

In: the batches of one rank. Out: calls of the native client, which holds rows and replays the rank's
own updates on them. The embedding worker and servers get the updates as in other modes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from persia import env
from persia._native import BatchReference, LookupResult
from persia.config import SlotsConfig
from persia.config.slots_config import DENSE_MODE
from persia.errors import FailedPreconditionError, InvalidArgumentError, PersiaError
from persia.logger import get_default_logger
from persia.pipeline.backend import NEW_CONTEXT, ClusterBackend, EmbeddingBackend, SlotGradients
from persia.pipeline.staleness import served_slots

_SYNCHRONOUS = "use consistency='synchronous'"


class ExactCalls:
    """The calls of a batch of an exact context. Thread-safe; `pool` and `apply` belong to the loop."""

    def __init__(self, backend: ClusterBackend) -> None:
        self._backend = backend
        self._deadline_s = env.get_deadline_s()
        self._turns = itertools.count()  # of workers, for batches without a reference
        self._has_ended = False

    @classmethod
    def begin(
        cls,
        backend: EmbeddingBackend,
        slots: SlotsConfig | None,
        world_size: int,
        device: torch.device | None,
    ) -> ExactCalls | None:
        """None: an embedded job, where no network is to be hidden, so synchronous training does as well.

        InvalidArgumentError, FailedPreconditionError: a setting that the mode cannot train exactly.
        """
        if world_size > 1:
            raise InvalidArgumentError(
                f"consistency='exact' with world_size {world_size}: a rank replays its own updates and does "
                f"not know those of the others: train with one rank, or {_SYNCHRONOUS}"
            )
        _check_slot_modes(backend.slot_modes)
        if not isinstance(backend, ClusterBackend):
            return None
        _check_device(device)
        if slots is None:
            raise FailedPreconditionError(
                "consistency='exact' needs the job's slots: give slots=... to the context, or set "
                "PERSIA_EMBEDDING_CONFIG"
            )
        if backend.schema != slots.schema_hash():
            raise InvalidArgumentError(
                "consistency='exact': PERSIA_EMBEDDING_CONFIG of this process has other slots than the "
                "embedding workers: give both the same file"
            )
        if num_batches := backend.count_in_flight():
            raise FailedPreconditionError(
                f"consistency='exact' while {num_batches} batches of another context are in flight, whose "
                "updates the rank would not replay: end their loop before this context begins"
            )
        backend.client.begin_exact(
            slots=slots.native_slots(),
            feature_index_prefix_bit=slots.feature_index_prefix_bit,
            served=served_slots(backend.slot_modes),
            max_bytes=env.get_exact_row_bytes(),
        )
        backend.num_exact += 1
        return cls(backend)

    def look_up(self, reference: BatchReference | None, id_features: bytes | memoryview) -> LookupResult:
        """Brings the rows of a batch that the rank does not hold; all slots of the result are absent."""
        look_up = self._backend.client.lookup_whole
        anywhere = BatchReference(next(self._turns) % (1 << 31), 0, 0)
        direct = partial(look_up, anywhere, id_features, timeout_s=self._deadline_s)
        look_up_anew = partial(self._backend.look_up_anywhere, id_features, direct)
        if reference is None:
            return look_up_anew()
        call = partial(look_up, id_features=id_features, timeout_s=self._deadline_s)
        return self._backend.look_up_held(reference, id_features, call, look_up_anew)

    def pool(self, reference: BatchReference) -> LookupResult:
        """The embeddings of the batch, with every update that `apply` has had."""
        return self._backend.client.pool_exact(reference)

    def apply(self, reference: BatchReference, gradients: SlotGradients, scale: float) -> None:
        """Updates the rows that the rank holds. The servers get the gradients by `return_gradients`."""
        self._backend.client.apply_exact(reference, gradients, scale=scale)

    def end(self) -> None:
        """Other contexts may train from now on. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._backend.num_exact -= 1
            self._backend.client.end_exact()

    def fail(self, reference: BatchReference, what: str) -> None:
        """The servers do not get an update that `apply` may have had: later calls raise `what`."""
        self._backend.client.fail_exact(reference, f"{what}: {NEW_CONTEXT}")
        self.drop(reference)

    def drop(self, reference: BatchReference) -> None:
        """The batch gets no gradients, although it was handed in."""
        try:
            self._backend.release(reference)
        except PersiaError as failure:  # the worker lets the batch expire; the rank holds no rows of it
            get_default_logger().warning("a batch was not released at its worker: %s", failure)


@contextlib.contextmanager
def other_rows(backend: EmbeddingBackend, what: str) -> Iterator[None]:
    """While `what` changes rows by other means than training.

    FailedPreconditionError: an exact context, which may be another one, has batches in flight.
    """
    if isinstance(backend, ClusterBackend):
        with backend.client.other_rows(what):
            yield
    else:
        yield


def check_batch(requires_grad: bool, ahead: bool, device: torch.device | None) -> None:
    """InvalidArgumentError: a batch that an exact context does not look up. `ahead`: of its loop."""
    if ahead and not requires_grad:
        raise InvalidArgumentError(
            "requires_grad=False between the batches of consistency='exact' would be looked up "
            "before earlier updates: look it up by get_embedding_from_data, or in eval_ctx()"
        )
    if requires_grad:
        _check_device(device)


def _check_device(device: torch.device | None) -> None:
    if device is not None and device.type != "cpu":
        raise InvalidArgumentError(
            f"consistency='exact' with the device {device}: updates are replayed on the CPU: leave "
            f"device_id out, or {_SYNCHRONOUS}"
        )


def _check_slot_modes(slot_modes: Sequence[str]) -> None:
    if own := [mode for mode in slot_modes if mode not in ("", DENSE_MODE)]:
        raise InvalidArgumentError(
            f"consistency='exact' with slots of {own} in the embedding config: leave out their consistency "
            "and embedding_staleness, or choose another consistency for the job"
        )
