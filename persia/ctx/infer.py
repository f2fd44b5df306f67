"""The context of an inference server: lookups at embedding workers whose addresses are known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia.ctx.base import PreprocessMode
from persia.ctx.embedding import EmbeddingCtx
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from persia.job.embedded import read_slots
from persia.job.inference import InferenceBackend, wait_for_worker
from persia.pipeline.queues import Deadline


class InferCtx(EmbeddingCtx):
    """Looks embeddings up for inference, with or without `with`. Needs no broker, and changes no row.

    ```python
    ctx = InferCtx(get_embedding_worker_services())
    ctx.wait_for_serving()
    batch = ctx.get_embedding_from_bytes(message)
    dense, embeddings, _ = ctx.prepare_features(batch)
    ```

    Args:
        embedding_worker_address_list: "host:port" of each embedding worker; lookups take turns, and pass by
            a worker that does not answer. UnavailableError names them all when none does.
        args, kwargs: as for `EmbeddingCtx` after its mode: model, embedding_config, threadpool_worker_size,
            device_id. Needs the model if slots are placed in it: workers have no rows of them. A context
            without it refuses their batches if it knows the slots, by `slots` or PERSIA_EMBEDDING_CONFIG.
    """

    def __init__(self, embedding_worker_address_list: Sequence[str], *args: Any, **kwargs: Any) -> None:
        self._addresses = _checked_addresses(embedding_worker_address_list)
        super().__init__(PreprocessMode.INFERENCE, *args, backend=InferenceBackend(self._addresses), **kwargs)
        if self._dense_slots is None:
            self._slots = self._slots or read_slots(None)

    def wait_for_serving(self, timeout_s: float | None = None) -> None:
        """Returns once every embedding worker, and through it every parameter server, answers.

        Raises DeadlineExceededError naming the worker that did not by `timeout_s` (None:
        PERSIA_DEADLINE_SEC).
        """
        timeout_s = env.get_deadline_s() if timeout_s is None else timeout_s
        # One deadline for all workers: they start at the same time, so their waits overlap.
        deadline = Deadline(timeout_s)
        for address in self._addresses:
            wait_for_worker(address, deadline, timeout_s)

    def set_embedding(self, slot: str, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Refused: inference reads only."""
        raise FailedPreconditionError("an InferCtx changes nothing: set rows in a TrainCtx")

    def clear_embeddings(self) -> None:
        """Refused: inference reads only."""
        raise FailedPreconditionError("an InferCtx changes nothing: clear embeddings in a TrainCtx")


def _checked_addresses(addresses: Sequence[str]) -> list[str]:
    # A single text is a sequence of texts, too: each of its letters would be an address.
    if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
        raise InvalidTypeError(
            f"embedding_worker_address_list is {addresses!r}: pass a list of 'host:port' texts"
        )
    if not addresses:
        raise InvalidArgumentError("embedding_worker_address_list is empty: name at least one 'host:port'")
    for address in addresses:
        if not re.fullmatch(r".+:\d{1,5}", address):
            raise InvalidArgumentError(f"embedding_worker_address_list has {address!r}: not like 'host:port'")
    return list(addresses)
