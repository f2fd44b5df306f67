"""Interface of a session, as its users see it: `NatsSession`, or `LocalSession` without a broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from persia.messaging.subjects import Subjects

Handler = Callable[[bytes], "bytes | Awaitable[bytes | None] | None"]


class Registration:
    """A subscription of a session, to be ended by `close` (or with the session)."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def close(self) -> None:
        """Takes no new messages, and finishes those being handled. Idempotent."""
        close, self._close = self._close, lambda: None
        close()


class Session(Protocol):
    """Contracts: `persia.messaging.session.NatsSession`."""

    subjects: Subjects

    @property
    def is_connected(self) -> bool: ...

    def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes: ...

    def interrupt(self, subject: str) -> None: ...

    def request_many(
        self, subject: str, payload: bytes, window_s: float, *, enough: Callable[[bytes], bool] | None = None
    ) -> list[bytes]: ...

    def publish(self, subject: str, payload: bytes) -> None: ...

    def respond(self, subject: str, handler: Handler, *, max_concurrency: int = 8) -> Registration: ...

    def subscribe(self, subject: str, callback: Callable[[bytes], None]) -> Registration: ...

    def on_reconnect(self, callback: Callable[[], None]) -> Registration: ...

    def close(self) -> None: ...
