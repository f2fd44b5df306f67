"""The standby of a parameter server: a second copy of its rows, which replaces it when it dies (ADR 41).

The native server replicates operations. This module decides which process of an index is the primary. The
two ask each other over the broker:

* A standby asks its primary five times a second. It takes over when the primary neither answers nor accepts
  connections, if it had an answer within the last `_LEASE_S`.
* A primary whose standby takes no operations applies nothing until it has asked the standby to end. It
  continues alone if the standby agrees or its port is closed. If the standby does not answer, the primary
  waits until the lease has certainly expired. Without the broker it waits for the broker.

So of two that cannot reach each other at most one acknowledges updates.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from persia import env
from persia.checkpoint.protocol import Request, Verb
from persia.errors import DeadlineExceededError, FailedPreconditionError, PersiaError
from persia.logger import get_default_logger
from persia.messaging.discovery import Directory
from persia.messaging.interface import Session
from persia.messaging.payloads import JsonMessage
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.waiting import Attempts

if TYPE_CHECKING:
    from persia._native import ParameterServer

__all__ = ["Primary", "Standby", "is_running", "refusing_loads"]

_POLL_S = 0.2
_ANSWER_S = 0.5
_LEASE_S = 3.0
_PROBE_S = 0.3
# Of a process that has lost its index to its standby. An orderly end would say that the server has left.
_REPLACED_EXIT_CODE = 3


class _Verb(Enum):
    ATTACH = "attach"  # of a standby: send me every operation
    POLL = "poll"  # of a standby: is this the primary that I am attached to?
    END = "end"  # of a primary: never take over


@dataclass(frozen=True, kw_only=True)
class _Message(JsonMessage):
    """A question of one server of an index to the other, and its answer."""

    what = "standby message"

    verb: _Verb
    address: str  # "host:port" of the RPC of the server that sends it
    standby: str  # incarnation of the standby that it is about
    agrees: bool = True


def is_running(session: Session, index: int) -> bool:
    """Whether a server of this index answers: a process that starts beside it can only be its standby."""
    return Directory(session).probe(EMBEDDING_PARAMETER_SERVER, index, _PROBE_S) is not None


def refusing_loads(handle: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """`handle` of a CheckpointService, for a server whose rows may change by replicated operations alone."""

    def checked(payload: bytes) -> bytes:
        if Request.decode(payload).verb is Verb.LOAD:
            raise FailedPreconditionError(
                "parameter servers with standbys do not load checkpoints: set "
                "embedding_parameter_server_config.standbys to 0 to continue from one"
            )
        return handle(payload)

    return checked


class Primary:
    """The primary's side, from creation to `close`. Thread-safe."""

    def __init__(self, session: Session, server: ParameterServer, index: int, address: str) -> None:
        self._session, self._server, self._index, self._address = session, server, index, address
        self._standby: _Message | None = None
        self._answered_at = time.monotonic()
        self._is_closing = threading.Event()
        self._registration = session.respond(session.subjects.primary(index), self._answer)
        self._thread = threading.Thread(target=self._watch, name="persia-standby", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The standby takes over once the server's port is closed."""
        self._is_closing.set()
        self._thread.join()
        self._registration.close()

    def wait_for_standby(self) -> None:
        """DeadlineExceededError: none has joined within PERSIA_DEADLINE_SEC."""
        name = f"the standby of {EMBEDDING_PARAMETER_SERVER} {self._index}"
        for _ in Attempts(env.get_deadline_s(), waiting_for=lambda: name):
            if self._standby is not None:
                return
        raise DeadlineExceededError(
            f"{name} has not joined within PERSIA_DEADLINE_SEC: start `persia-launcher "
            f"embedding-parameter-server --standby --replica-index {self._index}`, or set "
            "embedding_parameter_server_config.standbys to 0"
        )

    def _answer(self, payload: bytes) -> bytes:
        message = _Message.decode(payload)
        known = self._standby
        is_repeated = known is not None and known.standby == message.standby
        if message.verb is _Verb.ATTACH and not is_repeated:
            self._server.attach_standby(message.address)
            self._standby = known = message
            get_default_logger().info("the standby at %s has every change from now on", message.address)
        # Before the answer: the standby's lease must not begin later than this process believes.
        self._answered_at = time.monotonic()
        agrees = known is not None and known.standby == message.standby
        return _Message(
            verb=message.verb, address=self._address, standby=message.standby, agrees=agrees
        ).encode()

    def _watch(self) -> None:
        while not self._is_closing.wait(_POLL_S / 4):
            standby = self._standby
            if standby is not None and self._server.replication == "broken":
                self._resolve(standby)

    def _resolve(self, standby: _Message) -> None:
        agrees = self._ask_to_end(standby)
        if agrees is False:
            get_default_logger().error("the standby at %s has taken over: this server ends", standby.address)
            os._exit(_REPLACED_EXIT_CODE)
        # Without an answer: the process has ended, or it could not take over any more.
        expired = self._session.is_connected and time.monotonic() - self._answered_at > 2 * _LEASE_S
        if agrees or expired or _accepts_connections(standby.address) is False:
            self._standby = None
            self._server.release_standby()
            get_default_logger().error("the standby at %s is lost: updates go on without it", standby.address)

    def _ask_to_end(self, standby: _Message) -> bool | None:
        """None: it does not answer."""
        question = _Message(verb=_Verb.END, address=self._address, standby=standby.standby)
        try:
            reply = self._session.request(
                self._session.subjects.standby(self._index), question.encode(), _ANSWER_S
            )
            return _Message.decode(reply).agrees
        except PersiaError:
            return None


class Standby:
    """The standby's side: `wait_to_take_over` returns when this process is the server of its index."""

    def __init__(self, session: Session, server: ParameterServer, index: int, address: str) -> None:
        self._session, self._server, self._index = session, server, index
        self._me = _Message(verb=_Verb.POLL, address=address, standby=f"{server.incarnation:016x}")
        self._lock = threading.Lock()  # a process that has agreed to end never takes over
        self._has_taken_over = False
        self._must_end = False

    def wait_to_take_over(self) -> bool:
        """False: the primary continues without this standby, which must end.

        FailedPreconditionError: the primary may have changed without this standby.
        """
        with self._answering():
            primary = self._attach()
            heard_at = time.monotonic()
            while True:
                time.sleep(_POLL_S)
                asked_at = time.monotonic()
                if self._must_end:
                    return False
                answer = self._ask(_Verb.POLL)
                if answer is not None:
                    if not answer.agrees or answer.address != primary.address:
                        raise FailedPreconditionError(f"the server at {answer.address} has no such standby")
                    heard_at = asked_at
                # One that is frozen accepts connections. It may wake, and this standby is still its own.
                elif _accepts_connections(primary.address):
                    continue
                elif asked_at - heard_at > _LEASE_S:
                    raise FailedPreconditionError(
                        f"the primary at {primary.address} has died more than {_LEASE_S:g} s after its last "
                        "answer: it may have changed without this standby"
                    )
                else:
                    return self._take_over()

    def _take_over(self) -> bool:
        with self._lock:
            self._has_taken_over = not self._must_end
        if self._has_taken_over:
            self._server.take_over()
            get_default_logger().error("the primary has died: this standby takes over")
        return self._has_taken_over

    def _attach(self) -> _Message:
        name = f"{EMBEDDING_PARAMETER_SERVER} {self._index} that this standby belongs to"
        for _ in Attempts(env.get_deadline_s(), pause_s=_POLL_S, waiting_for=lambda: name):
            if (answer := self._ask(_Verb.ATTACH)) is not None:
                return answer
        raise DeadlineExceededError(f"no {name} has answered within PERSIA_DEADLINE_SEC")

    def _ask(self, verb: _Verb) -> _Message | None:
        question = _Message(verb=verb, address=self._me.address, standby=self._me.standby)
        try:
            reply = self._session.request(
                self._session.subjects.primary(self._index), question.encode(), _ANSWER_S
            )
        except FailedPreconditionError:  # it has another standby, or rows that this one lacks
            raise
        except PersiaError:
            return None
        return _Message.decode(reply)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        registration = self._session.respond(self._session.subjects.standby(self._index), self._answer)
        try:
            yield
        finally:
            registration.close()

    def _answer(self, payload: bytes) -> bytes:
        message = _Message.decode(payload)
        with self._lock:
            self._must_end |= not self._has_taken_over
            agrees = self._must_end
        return _Message(
            verb=_Verb.END, address=self._me.address, standby=message.standby, agrees=agrees
        ).encode()


def _accepts_connections(address: str) -> bool | None:
    """False: no process listens there. None: its host does not answer."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
