"""The `Session` of a job inside one process, which has no broker.

The same subjects, payloads, discovery and back-pressure run over it, so that an embedded job takes the code
path of a cluster. A message is a call on the sender's thread; nothing is queued.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from persia.errors import FailedPreconditionError, InternalError, PersiaError, UnavailableError
from persia.messaging.interface import Handler, Registration
from persia.messaging.subjects import Subjects

_JOB_NAME = "embedded"  # brokers share nothing, so all jobs may have one name


class LocalBroker(dict[str, list[Handler]]):
    """The handlers of one job by subject."""

    # Without a lock, although sessions of several threads share it: they use single operations of dict and
    # list alone, which are atomic.


class LocalSession:
    """One participant of an embedded job: `Session` over a `LocalBroker`.

    Differs from a NATS session where there is no network: replies are there when the call returns, so
    time-outs are never reached but by handlers that wait, and `max_concurrency` is the number of callers.
    """

    def __init__(self, broker: LocalBroker, *, name: str) -> None:
        self.subjects = Subjects(_JOB_NAME)
        self._broker = broker
        self._name = name
        self._registrations: list[Registration] = []
        self._is_open = True

    @property
    def is_connected(self) -> bool:
        return self._is_open

    def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Returns the reply of the first listener on `subject`; raises UnavailableError if there is none."""
        for reply in self._replies(subject, payload):
            return reply
        raise UnavailableError(f"no listener on {subject}: its context has not started, or has ended")

    def interrupt(self, subject: str) -> None:
        """Does nothing: a listener of this process cannot miss a request."""

    def request_many(
        self, subject: str, payload: bytes, window_s: float, *, enough: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        """The replies of all who listen on `subject`, up to the one of which `enough(reply)` says so."""
        replies = []
        for reply in self._replies(subject, payload):
            replies.append(reply)
            if enough is not None and enough(reply):
                break
        return replies

    def publish(self, subject: str, payload: bytes) -> None:
        """Calls every listener."""
        for _ in self._replies(subject, payload):
            pass

    def respond(self, subject: str, handler: Handler, *, max_concurrency: int = 8) -> Registration:
        """Answers each request on `subject` with what `handler(payload)` returns, on the asker's thread."""
        return self._register(subject, handler)

    def subscribe(self, subject: str, callback: Callable[[bytes], None]) -> Registration:
        """Calls `callback(payload)` for each message on `subject`, on the publisher's thread."""
        return self._register(subject, callback)

    def on_reconnect(self, callback: Callable[[], None]) -> Registration:
        """Never called: nothing can be lost."""
        return Registration(lambda: None)

    def close(self) -> None:
        """Listens and sends no more; idempotent."""
        self._is_open = False
        registrations, self._registrations = self._registrations, []  # two may close at once
        for registration in registrations:
            registration.close()

    def _register(self, subject: str, handler: Handler) -> Registration:
        self._check_open()
        handlers = self._broker.setdefault(subject, [])
        handlers.append(handler)
        registration = Registration(lambda: handlers.remove(handler))
        # Also kept here: the session ends its subscriptions, the broker outlives it.
        self._registrations.append(registration)
        return registration

    def _replies(self, subject: str, payload: bytes) -> Iterator[bytes]:
        """Calls one listener after the other, each when its reply is asked for."""
        self._check_open()
        # Over a copy: handlers may subscribe and unsubscribe while they are called.
        for handler in tuple(self._broker.get(subject, ())):
            if (reply := _invoke(handler, payload)) is not None:
                yield reply

    def _check_open(self) -> None:
        if not self._is_open:
            raise FailedPreconditionError(f"the session {self._name} of the embedded job is closed")


def _invoke(handler: Handler, payload: bytes) -> bytes | None:
    try:
        result = handler(payload)
        if inspect.iscoroutine(result):
            return _drive(result)
        assert result is None or isinstance(result, bytes), "other awaitables are not used by handlers"
        return result
    except PersiaError:
        raise
    except Exception as error:  # as over a network: the asker gets an error of ours, the cause stays visible
        raise InternalError(f"{type(error).__name__}: {error}") from error


def _drive(coroutine: Coroutine[Any, Any, bytes | None]) -> bytes | None:
    """Handlers that run on a session's loop must not block, so one step ends them; no loop is needed."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: bytes | None = end.value
        return result
    coroutine.close()
    raise InternalError("a handler on the session's loop has waited for something")
