"""The embedding worker's answer to loaders: registers their ID features, or says why not."""

from __future__ import annotations

import random
from collections.abc import Callable

from persia.errors import PersiaError, ResourceExhaustedError
from persia.messaging.payloads import IdsReply, IdsRequest, ReplyStatus

__all__ = ["IdsResponder", "RegisterIds"]

_RETRY_MS = (5, 20)  # loaders that were refused together come back at different times

# (loader index, ID features) -> (incarnation of the worker, reference). ResourceExhaustedError: it is full.
RegisterIds = Callable[[int, "bytes | memoryview"], "tuple[int, int]"]


class IdsResponder:
    """A handler for the subject of ID features. Called on several threads."""

    def __init__(self, register: RegisterIds) -> None:
        self._register_ids = register

    def __call__(self, payload: bytes) -> bytes:
        return self._register(payload).encode()

    def _register(self, payload: bytes) -> IdsReply:
        try:
            request = IdsRequest.decode(payload)
            incarnation, reference = self._register_ids(request.loader_index, request.id_features)
        except ResourceExhaustedError:
            return IdsReply(ReplyStatus.FULL, retry_ms=random.randint(*_RETRY_MS))
        except PersiaError as error:
            return IdsReply(ReplyStatus.ERROR, message=str(error))
        return IdsReply(ReplyStatus.OK, worker_incarnation=incarnation, reference=reference)
