"""Messages between the processes of one parameter server with standbys: see persia/roles/standby.py."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from persia import env
from persia.config.global_config import EmbeddingParameterServerConfig
from persia.errors import (
    CorruptionError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PersiaError,
    UnavailableError,
)
from persia.messaging.discovery import Directory, ServiceInfo
from persia.messaging.payloads import JsonMessage
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.waiting import Attempts

if TYPE_CHECKING:
    from persia._native import ParameterServer

_ANSWER_S = 0.5
PROBE_S = 0.3
_ALL = "all"
_ROUNDS_S = 3.0  # for the answers of a process on a busy machine
_PAUSE_S = 3.0  # longer than a round of questions takes


class Question(Enum):
    WHO = "who"  # of every process: are you a standby that has the rows?
    ATTACH = "attach"  # of a standby: copy your rows to me, and send every operation
    POLL = "poll"  # of a standby: do you replicate to me?
    END = "end"  # of a primary: never take over
    LEFT = "left"  # of a primary, which answers nothing any more: take over


@dataclass(frozen=True, kw_only=True)
class Message(JsonMessage):
    """A question of one process of an index to another, or its answer."""

    what = "standby message"

    verb: Question
    incarnation: str  # of the process that sends it, 16 hex digits
    address: str  # "host:port" of its RPC
    config: str = ""  # of ATTACH: hash of the settings that both must share
    agrees: bool = True


class Sign(Enum):
    """What the broker says of a process that was asked."""

    ANSWERED = "answered"
    GONE = "gone"  # no process listens on its subject
    SILENT = "silent"  # a process listens, and has not answered in time
    UNKNOWN = "unknown"  # the broker did not answer


def config_hash(section: EmbeddingParameterServerConfig, replicas: int, schema: str) -> str:
    """Hash of what must be equal for two servers to have the same bits after the same operations."""
    # Settings that decide which rows are evicted, and how they are rounded. A standby with others would have
    # other rows after the same operations.
    parts: list[object] = [section.capacity, section.num_hashmap_internal_shards, section.row_dtype]
    parts += [section.standby_deadline_sec, replicas, schema]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def starts_as_standby(session: NatsSession, index: int, own: str = "") -> bool:
    """Whether another process has the rows of the index: one that starts can only be its standby.

    `own`: the incarnation of this process, where it answers already.
    """
    # Several times: one that is not heard on a busy machine would lose its index to an empty server.
    attempts, broker = Attempts(_ROUNDS_S, pause_s=_ROUNDS_S / 10), Attempts(env.get_deadline_s())
    connection = session.num_reconnects
    for _ in attempts:
        if Directory(session).probe(EMBEDDING_PARAMETER_SERVER, index, PROBE_S) is not None:
            return True
        if any(message.agrees and message.incarnation != own for message in _ask_all(session, index)):
            return True
        if not session.is_connected or session.num_reconnects != connection:
            # Others were not asked, and those that have the rows may have to connect again, too.
            connection = session.num_reconnects
            attempts.progressed()
            if not broker.left_s:
                raise UnavailableError("the broker is away, so it is not known who has the rows")
    return False


class Presence:
    """Since when this process runs without a pause, on one connection to the broker. Thread-safe.

    One that was frozen or cut off has not asked others, whatever its clock says.
    """

    def __init__(self, session: NatsSession, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._clock = session, clock
        self._lock = threading.Lock()
        self._since = self._seen_at = clock()
        self._connection = session.num_reconnects

    def lasts_s(self, at: float = float("-inf")) -> float:
        """Seconds until now, at most those since `at`. More than 3 s between two calls are a pause."""
        with self._lock:
            now, connection = self._clock(), self._session.num_reconnects
            if now - self._seen_at > _PAUSE_S or connection != self._connection:
                self._since = now
            self._seen_at, self._connection = now, connection
            return now - max(self._since, at)

    def end(self) -> None:
        """It begins anew: the broker is away."""
        with self._lock:
            self._since = self._clock()


class Replica:
    """What this process says to the others of its index, until it ends. Thread-safe."""

    def __init__(self, session: NatsSession, server: ParameterServer, index: int, address: str) -> None:
        self.session, self.server, self.index, self.address = session, server, index, address
        self.incarnation = f"{server.incarnation:016x}"
        self._handlers: dict[Question, Callable[[Message], bool | None]] = {Question.WHO: self._has_rows}
        self._registrations = [
            session.respond(session.subjects.replica(index, name), self._answer)
            # One subject to be asked alone, for agreements that must not be answered by another, and one for
            # questions to all processes of the index.
            for name in (self.incarnation, _ALL)
        ]

    def close(self) -> None:
        for registration in self._registrations:
            registration.close()

    @property
    def is_serving(self) -> bool:
        """False: its standby may have taken over, so that this server speaks for its index no more."""
        return self.server.replication not in ("stalled", "broken", "fenced")

    def handle(self, verb: Question, handler: Callable[[Message], bool | None]) -> None:
        """From now on, `handler` says whether this process agrees to what `verb` asks."""
        self._handlers[verb] = handler

    def ask(
        self, verb: Question, incarnation: str, *, config: str = "", timeout_s: float = _ANSWER_S
    ) -> tuple[Sign, Message | None]:
        """Asks one process. FailedPreconditionError, InvalidArgumentError: its refusal."""
        question = Message(verb=verb, incarnation=self.incarnation, address=self.address, config=config)
        subject = self.session.subjects.replica(self.index, incarnation)
        try:
            reply = self.session.request(subject, question.encode(), timeout_s)
            return Sign.ANSWERED, Message.decode(reply)
        except (FailedPreconditionError, InvalidArgumentError):
            raise
        except DeadlineExceededError:
            return Sign.SILENT, None
        except UnavailableError as error:
            return (Sign.GONE if error.has_no_listener else Sign.UNKNOWN), None
        except PersiaError:
            return Sign.UNKNOWN, None

    def reaches_broker(self) -> bool:
        """Whether the broker has just delivered a message of this process to itself."""
        return self.ask(Question.WHO, self.incarnation)[0] is Sign.ANSWERED

    def has_ended(self, address: str, incarnation: str) -> bool:
        """Whether that process listens no more: its port is closed, or is that of a process started since."""
        accepts = _accepts_connections(address)
        if accepts is not True:
            return accepts is False
        try:
            present = _ask_all(self.session, self.index)
        except PersiaError:  # the broker is away: the next try
            return False
        return any(other.address == address and other.incarnation != incarnation for other in present)

    def others(self) -> list[ServiceInfo]:
        """Other servers that answer as the server of this index."""
        present = Directory(self.session).present(EMBEDDING_PARAMETER_SERVER, PROBE_S)
        mine = self.server.incarnation
        return [info for info in present if info.index == self.index and info.incarnation != mine]

    def _answer(self, payload: bytes) -> bytes | None:
        message = Message.decode(payload)
        handler = self._handlers.get(message.verb)
        agrees = False if handler is None else handler(message)
        if agrees is None:
            return None
        return Message(
            verb=message.verb, incarnation=self.incarnation, address=self.address, agrees=agrees
        ).encode()

    def _has_rows(self, _message: Message) -> bool:
        try:
            return self.server.has_copy and self.server.standby_state in ("following", "taken over")
        except ValueError:  # it began as a primary, which discovery knows
            return False


def _ask_all(session: NatsSession, index: int) -> list[Message]:
    """What all processes of the index answer to WHO."""
    question = Message(verb=Question.WHO, incarnation="", address="")
    replies = session.request_many(session.subjects.replica(index, _ALL), question.encode(), _ANSWER_S)
    answers = []
    for reply in replies:
        with contextlib.suppress(CorruptionError):  # of a process that is ending
            answers.append(Message.decode(reply))
    return answers


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
