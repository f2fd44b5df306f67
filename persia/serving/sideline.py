"""Work beside the answers of requests: one thread, which drops what comes while it is behind."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool, lower_priority

_T = TypeVar("_T")
_MAX_WAITING = 64  # each may have the size of a request
_CLOSE_S = 5.0


class Sideline(Generic[_T]):
    """Calls `handle` on a thread of its own, for one item after the other. One thread offers items."""

    def __init__(self, name: str, handle: Callable[[_T], None]) -> None:
        self.num_dropped = 0
        self._name, self._handle = name, handle
        self._pool = DaemonPool(1, name)
        self._last: Future[Any] | None = None

    def offer(self, item: _T) -> None:
        """Never waits."""
        if self._pool.num_unfinished > _MAX_WAITING:
            self.num_dropped += 1
        else:
            self._last = self._pool.submit(self._call, item)

    def close(self) -> None:
        """Handles what waits, for at most five seconds."""
        if self._last is not None:
            wait([self._last], _CLOSE_S)
        self._pool.close()

    def _call(self, item: _T) -> None:
        lower_priority()  # requests that wait for an answer come first
        try:
            self._handle(item)
        except Exception:  # else it would stay in a Future that is not looked at
            get_default_logger().exception("%s failed", self._name)


def is_drawn(share: float, request_id: str, purpose: str) -> bool:
    """Whether a request is of the share. Servers agree about equal IDs; without an ID it is left to chance.

    Draws for different purposes are independent of each other.
    """
    if not request_id:
        return random.random() < share
    # IDs of JSON may have half a surrogate pair.
    text = request_id.encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") < share * 2**64
