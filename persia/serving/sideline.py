"""Work beside the answers of requests: one thread, which drops what comes while it is behind."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from persia.logger import get_default_logger
from persia.messaging.daemon_pool import lower_priority

_T = TypeVar("_T")
_MAX_WAITING = 64  # each may have the size of a request
_CLOSE_S = 5.0


class Sideline(Generic[_T]):
    """Calls `handle` on a thread of its own, for one item after the other. `offer` never waits."""

    def __init__(self, name: str, handle: Callable[[_T], None]) -> None:
        self.num_dropped = 0
        self._handle = handle
        self._changed = threading.Condition()
        self._waiting: deque[_T] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, item: _T) -> None:
        with self._changed:
            if self._closed or len(self._waiting) >= _MAX_WAITING:
                self.num_dropped += 1
                return
            self._waiting.append(item)
            self._changed.notify()

    def close(self) -> None:
        """Handles what waits, for at most five seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        lower_priority()  # requests that wait for an answer come first
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                item = self._waiting.popleft()
            try:
                self._handle(item)
            except Exception:
                get_default_logger().exception("%s failed", self._thread.name)


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
