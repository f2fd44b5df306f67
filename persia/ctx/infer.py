"""The context of an inference server: lookups at embedding workers whose addresses are known."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia._native import LookupResult, RemoteClient
from persia.ctx.base import PreprocessMode
from persia.ctx.embedding import EmbeddingCtx
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    UnavailableError,
)
from persia.job.remote_rows import RemoteRows
from persia.logger import get_default_logger
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.queues import Deadline
from persia.pipeline.staleness import ALL_SLOTS

__all__ = ["InferCtx"]

_PROBE_S = 1.0
_RETRY_S = 0.1
_REPORT_INTERVAL_S = 5.0


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
            device_id.
    """

    def __init__(self, embedding_worker_address_list: Sequence[str], *args: Any, **kwargs: Any) -> None:
        self._addresses = _checked_addresses(embedding_worker_address_list)
        super().__init__(PreprocessMode.INFERENCE, *args, backend=_Backend(self._addresses), **kwargs)

    def wait_for_serving(self, timeout_s: float | None = None) -> None:
        """Returns once every embedding worker, and through it every parameter server, answers.

        Raises DeadlineExceededError naming the worker that did not by `timeout_s` (None:
        PERSIA_DEADLINE_SEC).
        """
        timeout_s = env.get_deadline_s() if timeout_s is None else timeout_s
        deadline = Deadline(timeout_s)
        for address in self._addresses:
            _wait_for(address, deadline, timeout_s)

    def set_embedding(self, slot: str, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Refused: inference reads only."""
        raise FailedPreconditionError("an InferCtx changes nothing: set rows in a TrainCtx")

    def clear_embeddings(self) -> None:
        """Refused: inference reads only."""
        raise FailedPreconditionError("an InferCtx changes nothing: clear embeddings in a TrainCtx")


class _Backend(EmbeddingBackend):
    """Lookups that pass by workers that are down; any worker can answer them, as none holds a batch."""

    def __init__(self, addresses: Sequence[str]) -> None:
        deadline_s = env.get_deadline_s()
        super().__init__(_client(addresses), deadline_s=deadline_s)
        self._rows = RemoteRows(addresses, deadline_s=deadline_s)

    def lookup_direct(
        self, id_features: bytes, *, requires_grad: bool, slots: int = ALL_SLOTS
    ) -> LookupResult:
        return self._rows.lookup(id_features)


def _client(addresses: Sequence[str]) -> RemoteClient:
    client = RemoteClient(len(addresses))
    for index, address in enumerate(addresses):
        client.set_worker(index, address)
    return client


def _checked_addresses(addresses: Sequence[str]) -> list[str]:
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


def _wait_for(address: str, deadline: Deadline, timeout_s: float) -> None:
    probe = _client([address])  # one of its own: calls of a shared client go to one worker for all
    next_report = time.monotonic() + _REPORT_INTERVAL_S
    while True:
        try:
            probe.sizes(timeout_s=max(_RETRY_S, min(_PROBE_S, deadline.left_s())))
            return
        except (UnavailableError, DeadlineExceededError) as failure:
            if deadline.over:
                raise DeadlineExceededError(
                    f"the embedding worker at {address} does not serve after {timeout_s:g} s: {failure}"
                ) from failure
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_INTERVAL_S
                get_default_logger().info("waiting for the embedding worker at %s: %s", address, failure)
            time.sleep(_RETRY_S)
