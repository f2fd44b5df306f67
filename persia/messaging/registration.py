"""Handle of something registered with a session."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Registration"]


class Registration:
    """A subscription of a session, to be ended by `close` (or with the session)."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def close(self) -> None:
        """Takes no new messages, and finishes those being handled. Idempotent."""
        close, self._close = self._close, lambda: None
        close()
