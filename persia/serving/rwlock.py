"""A lock that many threads hold shared to read, and one exclusively to replace what they read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class RwLock:
    """A waiting writer goes first: later readers wait for it, so that load cannot starve it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._has_writer = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._has_writer)
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                if self._num_readers == 0:
                    self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._has_writer)
            # Set before the readers have left: later readers wait, so their stream cannot starve the writer.
            self._has_writer = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._num_readers == 0)
            yield
        finally:
            with self._changed:
                self._has_writer = False
                self._changed.notify_all()
