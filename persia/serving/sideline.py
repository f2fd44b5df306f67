"""Work beside the answers of requests: one thread, which drops what comes while it is behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

from persia._native import Draw
from persia.errors import InvalidArgumentError
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool, lower_priority

_T = TypeVar("_T")
_MAX_WAITING = 64  # each may have the size of a request
_CLOSE_S = 5.0
_REREAD_S = 1.0


class Sideline(Generic[_T]):
    """Calls `handle` on a thread of its own, for one item after the other. One thread offers items."""

    def __init__(self, name: str, handle: Callable[[_T], None]) -> None:
        self.num_dropped = 0
        self._name, self._handle = name, handle
        self._pool = DaemonPool(1, name)
        self._last: Future[Any] | None = None

    def offer(self, item: _T) -> None:
        """Never waits."""
        # Dropped rather than queued: what is beside the answers must cost no memory when it cannot keep up,
        # and `num_dropped` says that it happened.
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


class Share:
    """A share of requests: a number, or a file with one, which may change while requests are drawn.

    The file is read while a request waits: it should lie on this machine, as a mounted ConfigMap does, and be
    replaced rather than written in place.

    Raises InvalidArgumentError for a file that has no number from 0 to 1. Later the share stays as it was.
    """

    def __init__(self, source: float | Path, purpose: str) -> None:
        """Draws for different purposes are independent of each other."""
        self._path = source if isinstance(source, Path) else None
        share = _share_of(source) if isinstance(source, Path) else source
        self.draw = Draw(purpose, share)  # has the share that was read last
        self._read_at, self._error = time.monotonic(), ""

    @property
    def value(self) -> float:
        """From 0 to 1."""
        now = time.monotonic()
        if self._path is not None and now >= self._read_at + _REREAD_S:
            # Before the file is read: a file system that hangs is then asked once a second, not for each
            # request.
            self._read_at, before, error = now, self.draw.share, ""
            try:
                self.draw.share = _share_of(self._path)
            except InvalidArgumentError as unreadable:
                error = str(unreadable)
            if self.draw.share != before:
                get_default_logger().info("%s: the share is now %g", self._path, self.draw.share)
            # Once for each mistake, as this is asked for every second.
            if error and error != self._error:
                get_default_logger().error("%s; the share stays %g", error, self.draw.share)
            self._error = error
        return self.draw.share

    def takes(self, request_id: str) -> bool:
        """Whether a request is of the share. Servers agree about equal IDs; without an ID it is left to
        chance."""
        # IDs of JSON may have half a surrogate pair.
        return self.value > 0 and self.draw.takes(request_id.encode(errors="surrogatepass"))


def _share_of(path: Path) -> float:
    try:
        share = float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} has no share: write a number from 0 to 1 ({error})") from error
    if not 0 <= share <= 1:
        raise InvalidArgumentError(f"{path} has the share {share:g}: write a number from 0 to 1")
    return share
