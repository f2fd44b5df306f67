"""A lock that many hold together to read, and one alone to switch what they read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["SharedLock"]


class SharedLock:
    """The one who switches goes first: who comes later waits, so that load cannot keep it out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._is_switching = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_switching)
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                if self._num_readers == 0:
                    self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_switching)
            self._is_switching = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._num_readers == 0)
            yield
        finally:
            with self._changed:
                self._is_switching = False
                self._changed.notify_all()
