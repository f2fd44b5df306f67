"""Discovery: services advertise themselves on NATS, and callers wait for the replicas they need, in any start
order.

In: a `Session`. Out: `ServiceInfo`s of the services that answer, and `ServiceEvent`s of those that join or
leave. An answer is only as true as the moment it was given, so nothing is cached here: `wait_for` and `probe`
ask, `watch` listens. A changed incarnation at an index means that the service has restarted and lost what it
had in memory.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, StrictBool, model_validator

from persia.config.slots_config import MAX_SLOT_MODES
from persia.errors import CorruptionError, DeadlineExceededError, FailedPreconditionError, PersiaError
from persia.logger import get_default_logger
from persia.messaging.interface import Registration, Session
from persia.messaging.payloads import MAX_REPLICAS, JsonMessage, MovedShards, check_moved_shards
from persia.messaging.subjects import EMBEDDING_WORKER, ROLES
from persia.validation import Count, complaint
from persia.waiting import Attempts

_FIRST_ROUND_S = 0.1
_LONGEST_ROUND_S = 1.0
# Older answers may be of services that have died; several of the longest rounds, as a machine may be busy.
_FRESH_S = 5.0
# How long a newcomer waits for the answers of others: longer if it does not hear its own, on a busy machine.
_CONFLICT_WINDOWS_S = (0.3, 0.6, 1.2, 2.4, 4.8)


def _check_role(role: str) -> str:
    if role not in ROLES:
        raise complaint(f"must be one of {', '.join(ROLES)}")
    return role


def _read_incarnation(value: object) -> int:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{16}", value):
        raise complaint("must be 16 hex digits")
    return int(value, 16)


# Text on the wire: other readers of JSON keep 53 bits of a number.
_Incarnation = Annotated[
    int, BeforeValidator(_read_incarnation), PlainSerializer(lambda value: f"{value:016x}")
]
_SlotMode = Annotated[str, Field(pattern="^(dense|synchronous|asynchronous|hybrid [1-9][0-9]{0,9})?$")]

# (replaced, successor) by incarnation, of those that this process has told of: servers are asked repeatedly.
_REPORTED: set[tuple[int, int]] = set()


@dataclass(frozen=True, kw_only=True)
class ServiceInfo(JsonMessage):
    """Description of a service, published by the service itself."""

    what = "service info"

    role: Annotated[str, AfterValidator(_check_role)]
    index: Count
    replicas: Annotated[Count, Field(le=MAX_REPLICAS)]
    incarnation: _Incarnation  # random 64-bit number drawn at start
    address: str = ""  # "host:port" of its RPC; empty when it has none
    schema: str = ""  # hash of the embedding config; empty when it has none
    pid: Count = 0
    status_address: str = ""  # "host:port" of its HTTP port with metrics and status; empty when it has none
    has_rows: StrictBool = False  # a parameter server that began with the rows of its predecessor
    # Of a parameter server with standbys, 0 of others: the one with the highest is the server of its index.
    term: Count = 0
    # Of a parameter server: how often their number was changed before it. Those of lower ones have ended.
    generation: Count = 0
    moved_shards: MovedShards = ()  # of a parameter server: the placement of its generation
    # SlotsConfig.slot_modes of an embedding worker; other roles have none.
    slot_modes: Annotated[tuple[_SlotMode, ...], Field(max_length=MAX_SLOT_MODES)] = ()

    @model_validator(mode="before")
    @classmethod
    def _check_complete(cls, values: Any) -> Any:
        # A service names every key. A default in the place of one, such as no slot modes, would be believed.
        names = [field.name for field in fields(cls)]
        if isinstance(values, Mapping) and (missing := [name for name in names if name not in values]):
            raise CorruptionError(
                f"{', '.join(missing)} is missing: it comes from another version of persia, probably; run "
                "one version in a job"
            )
        return values

    @model_validator(mode="after")
    def _check(self) -> ServiceInfo:
        if self.index >= self.replicas:
            raise CorruptionError(f"index {self.index} of {self.replicas} replicas is impossible")
        check_moved_shards(self.moved_shards, self.replicas)
        if self.role == EMBEDDING_WORKER and not self.slot_modes:
            raise CorruptionError("slot_modes is empty, and an embedding worker has slots")
        return self

    def is_outranked_by(self, known: ServiceInfo) -> bool:
        """Whether `known` is the server of this index: this one was replaced, and has woken."""
        if (self.generation, self.term) >= (known.generation, known.term):
            return False
        if (self.incarnation, known.incarnation) not in _REPORTED:
            _REPORTED.add((self.incarnation, known.incarnation))
            get_default_logger().warning(
                "ignored %s: %s has replaced it, unless the clock of its host was set back", self, known
            )
        return True

    def has_replaced(self, known: ServiceInfo) -> bool:
        """Whether `known` is one of another number of servers, which those of this one have replaced."""
        return self.role == known.role and self.generation > known.generation

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        return f"{self.role} {self.index} of {self.replicas}{where} (pid {self.pid})"


class EventKind(Enum):
    """Change of a watched service."""

    JOINED = "joined"
    LEFT = "left"


@dataclass(frozen=True)
class ServiceEvent(JsonMessage):
    """A service started (again) or stopped cleanly.

    A killed service publishes nothing; its successor publishes that it has joined.
    """

    what = "discovery event"

    kind: EventKind
    info: ServiceInfo
    failure: str = ""  # of one that left: the error that made it leave


class Advertiser:
    """Advertises this process as a service: joined at the start, answers to who, left at the end."""

    def __init__(
        self,
        session: Session,
        info: ServiceInfo,
        *,
        replaces: int = 0,
        is_serving: Callable[[], bool] = lambda: True,
    ) -> None:
        """`replaces`: the incarnation of a predecessor, which may still answer when it wakes. Callers find
        the service while `is_serving`, which must not block.
        """
        self.info = info
        self._is_serving = is_serving
        self._replaces = replaces
        self._session = session
        self._payload = info.encode()
        self._is_accepted = self._is_silent = False
        self._was_hidden = False  # when it was asked for
        self._registrations: list[Registration] = []

    def start(self, on_admitted: Callable[[], object] = lambda: None, *, is_silent: bool = False) -> None:
        """Advertises the service; one that `is_silent` says that it has joined only by `publish_again`.
        `on_admitted` subscribes to its requests. It is called once no other
        replica has this index, as a refused one must not answer, and before callers can find the service.

        Raises `FailedPreconditionError` when a running replica of the role holds the same index, or disagrees
        about the number of replicas or the embedding config: the newcomer is refused, the job continues.
        """
        subjects = self._session.subjects
        # Answering newcomers before asking: of two that start at the same moment, one sees the other.
        self._registrations.append(self._session.respond(subjects.who(self.info.role), self._answer))
        try:
            self._check_conflicts()
            on_admitted()
        except PersiaError:
            self._close_registrations()
            raise
        self._is_accepted, self._is_silent = True, is_silent
        # What was on its way when the broker went away is lost: peers may have missed the first message.
        self._registrations.append(self._session.on_reconnect(lambda: self._publish(EventKind.JOINED)))
        self._publish(EventKind.JOINED)

    def publish_again(self) -> None:
        """Says again that this service has joined, after another one has said so for its index."""
        self._is_silent = False
        self._publish(EventKind.JOINED)

    def publish_if_missed(self) -> None:
        """Says again that this service has joined if it serves, and was asked for while it did not."""
        if self._was_hidden and self._is_serving():
            self._was_hidden = False
            with contextlib.suppress(PersiaError):  # the connection is lost: it is said once there is another
                self.publish_again()

    def outrank(self, other: ServiceInfo) -> None:
        """Says that this service, and not `other`, is the one of its index, and has its rows."""
        self.change(term=other.term + 1, has_rows=True)
        self._publish(EventKind.JOINED)

    def others(self, window_s: float) -> list[ServiceInfo] | None:
        """Those of its role that answer within `window_s`, also those that callers do not find. None: this
        one does not hear itself, and may have missed others."""
        found = _who(self._session, self.info.role, window_s, asker=self._payload)
        others = [info for info in found if info.incarnation != self.info.incarnation]
        return others if len(others) < len(found) else None

    def change(self, **fields: Any) -> None:
        """Changes what this service answers from now on; publishes nothing."""
        self.info = replace(self.info, **fields)
        self._payload = self.info.encode()

    def stop(self, failure: str = "") -> None:
        """Publishes that the service has left. Never raises; does nothing for one that never joined."""
        if not self._registrations:
            return
        # Before it publishes: a caller that asks after LEFT must not find the service any more.
        self._close_registrations()
        try:
            self._publish(EventKind.LEFT, failure)
        except PersiaError as error:
            get_default_logger().info("%s could not publish that it has left: %s", self.info, error)

    def _close_registrations(self) -> None:
        registrations, self._registrations = self._registrations, []
        for registration in registrations:
            registration.close()

    def _publish(self, kind: EventKind, failure: str = "") -> None:
        if self._is_silent:
            return
        subject = self._session.subjects.advertise(self.info.role)
        self._session.publish(subject, ServiceEvent(kind, self.info, failure).encode())

    # On the session's loop: the answer must not wait for handler threads, which back-pressure may all block.
    async def _answer(self, asker: bytes) -> bytes | None:
        # Until its own check is done, only other newcomers see a service. They say who they are in the
        # request; callers of `wait_for` ask with an empty one.
        if asker or (self._is_accepted and self._is_serving()):
            return self._payload
        self._was_hidden |= self._is_accepted  # a watch that is connected again asks once
        return None

    def _check_conflicts(self) -> None:
        for window_s in _CONFLICT_WINDOWS_S:
            answers = _who(self._session, self.info.role, window_s, asker=self._payload)
            # This process listens already.
            if any(answer.incarnation == self.info.incarnation for answer in answers):
                break
        for other in answers:
            # The predecessor answers no more, nor will those whose rows this one gathers. And while others
            # gather its rows, a server that has died is started again as what it was.
            if other.incarnation in (self.info.incarnation, self._replaces):
                continue
            if other.generation != self.info.generation:
                continue
            if other.index == self.info.index:
                raise FailedPreconditionError(
                    f"{self.info.role} {self.info.index} is running already: {other}; stop it, or take "
                    "another --replica-index"
                )
            _check_agreement(self.info, other)


class Directory:
    """Finds the services of a job. Thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def wait_for(
        self, role: str, deadline_s: float, expected: int | None = None, *, schema: str = ""
    ) -> list[ServiceInfo]:
        """Waits until all replicas of `role` are there; returns them by index.

        `expected`: the number of replicas that must be configured; None takes the number the replicas say.
        `schema`: the hash of the caller's embedding config, "" to accept any. Raises
        `FailedPreconditionError` when replicas disagree with each other or with the caller, naming both
        values, and `DeadlineExceededError` naming the missing indices.
        """
        search = _Search(role, expected, schema)
        attempts = Attempts(
            deadline_s,
            pause_s=_FIRST_ROUND_S,
            longest_pause_s=_LONGEST_ROUND_S,
            waiting_for=lambda: f"services: {search.missing()}",
        )
        for round_s in attempts:
            search.begin_round(time.monotonic())
            _who(self._session, role, round_s, enough=search.accept)
            # Here and not in `accept`: what it raises belongs to the caller's thread, not to the loop.
            if (services := search.result()) is not None:
                if attempts.has_reported:
                    get_default_logger().info("found %s, %d of %d", role, len(services), len(services))
                return services
        raise DeadlineExceededError(
            f"{search.missing()} after {deadline_s:g} s (PERSIA_DEADLINE_SEC): look at its log, or start it "
            f"by `persia-launcher {role}` with the PERSIA_NATS_URL and PERSIA_JOB_NAME of this process"
        )

    def watch(
        self,
        role: str,
        callback: Callable[[ServiceEvent], None],
        *,
        on_joined: Callable[[ServiceInfo], None] = lambda _info: None,
    ) -> Registration:
        """Calls `callback` for each service of `role` that joins or leaves from now on, one at a time.

        A service is reported once for each incarnation, also when its event is missed while the broker is
        away. Watch first and then `wait_for`, so that no restart falls between them. `on_joined` is called
        after each message that a service has joined, also one without news: the service has lost its
        connection to the broker, and what it was asked meanwhile may be lost.
        """
        return _Watch(self._session, role, callback, on_joined)

    def probe(self, role: str, index: int, timeout_s: float) -> ServiceInfo | None:
        """Asks replica `index` of `role` to answer within `timeout_s`; None when it does not."""
        services = _who(self._session, role, timeout_s, enough=lambda info: info.index == index)
        return next((info for info in services if info.index == index), None)

    def present(self, role: str, window_s: float) -> list[ServiceInfo]:
        """The replicas of `role` that answer within `window_s`, by index; not waiting for any."""
        return sorted(_who(self._session, role, window_s), key=lambda info: info.index)


class _Search:
    """The answers of one `wait_for`. Filled on the session's loop, read by the caller between rounds."""

    def __init__(self, role: str, expected: int | None, schema: str) -> None:
        self.role = role
        self._expected = expected
        self._schema = schema
        self._found: dict[int, tuple[float, ServiceInfo]] = {}

    def begin_round(self, now: float) -> None:
        self._found = {index: entry for index, entry in self._found.items() if now - entry[0] <= _FRESH_S}

    def accept(self, info: ServiceInfo) -> bool:
        """Takes an answer; says whether all have answered."""
        generation = max((known.generation for _, known in self._found.values()), default=0)
        if info.generation < generation:  # it has handed its rows over, and ends
            return self._is_complete()
        if info.generation > generation:
            self._found.clear()
        known = self._found.get(info.index)
        if known is not None and info.is_outranked_by(known[1]):
            return self._is_complete()
        self._found[info.index] = (time.monotonic(), info)
        return self._is_complete()

    def result(self) -> list[ServiceInfo] | None:
        """The replicas by index, or None when some are missing."""
        services = [self._found[index][1] for index in sorted(self._found)]
        # Also while some are missing: waiting for the others would not repair a disagreement.
        for info in services:
            _check_agreement(services[0], info)
            self._check_caller(info)
        return services if self._is_complete() else None

    def missing(self) -> str:
        replicas = self._replicas()
        if not self._found:
            return f"no {self.role} has joined" + (f", {replicas} expected" if replicas else "")
        indices = ", ".join(str(index) for index in range(replicas) if index not in self._found)
        return f"{self.role} {indices} of {replicas} missing"

    def _replicas(self) -> int:
        if self._expected is not None:
            return self._expected
        return max((info.replicas for _, info in self._found.values()), default=0)

    def _is_complete(self) -> bool:
        replicas = self._replicas()
        return replicas > 0 and all(index in self._found for index in range(replicas))

    def _check_caller(self, info: ServiceInfo) -> None:
        if self._expected is not None and info.replicas != self._expected and info.role != EMBEDDING_WORKER:
            raise FailedPreconditionError(
                f"{info} was started with {info.replicas} replicas, {self._expected} are expected here: "
                "use the same --replica-size everywhere"
            )
        if self._schema and info.schema and info.schema != self._schema:
            raise FailedPreconditionError(
                f"{info} has the embedding config {info.schema}, this process {self._schema}: "
                "give both the same embedding config (--embedding-config, PERSIA_EMBEDDING_CONFIG or slots=)"
            )


class _Watch(Registration):
    """Turns joined, left and the answers after a reconnect into one event for each incarnation."""

    def __init__(
        self,
        session: Session,
        role: str,
        callback: Callable[[ServiceEvent], None],
        on_joined: Callable[[ServiceInfo], None],
    ) -> None:
        self._role = role
        self._callback, self._on_joined = callback, on_joined
        self._lock = threading.Lock()  # events come from two threads; it also keeps callbacks one at a time
        self._incarnations: dict[int, int] = {}
        self._terms: dict[int, int] = {}
        self._generation = 0
        subscription = session.subscribe(session.subjects.advertise(role), self._on_event)
        reconnection = session.on_reconnect(lambda: self._ask(session, role))

        def close() -> None:
            subscription.close()
            reconnection.close()

        super().__init__(close)

    def _on_event(self, payload: bytes) -> None:
        try:
            event = ServiceEvent.decode(payload)
        except CorruptionError as error:
            get_default_logger().warning("ignored a discovery event: %s", error)
            return
        if event.info.role != self._role:
            get_default_logger().warning(
                "ignored an event of %s on the subject of %s", event.info, self._role
            )
            return
        if self._take(event) and event.kind is EventKind.JOINED:
            self._on_joined(event.info)

    def _ask(self, session: Session, role: str) -> None:
        for info in _who(session, role, _LONGEST_ROUND_S):
            self._take(ServiceEvent(EventKind.JOINED, info))

    def _take(self, event: ServiceEvent) -> bool:
        """False: it comes from a service that was replaced."""
        info = event.info
        with self._lock:
            if event.kind is EventKind.JOINED:
                if info.generation < self._generation:
                    return False
                self._generation = info.generation
                # One that was replaced while it was cut off says that it has joined when it returns.
                if info.term < self._terms.get(info.index, 0):
                    return False
                self._terms[info.index] = info.term
                # Seen already: after a reconnect services are asked, and each also publishes that it joined.
                if self._incarnations.get(info.index) == info.incarnation:
                    return True
                self._incarnations[info.index] = info.incarnation
            self._callback(event)
        return True


def _who(
    session: Session,
    role: str,
    window_s: float,
    *,
    asker: bytes = b"",
    enough: Callable[[ServiceInfo], bool] = lambda info: False,
) -> list[ServiceInfo]:
    """The services of `role` that answer within `window_s`; earlier once `enough` says so of an answer."""
    services: list[ServiceInfo] = []

    def take(reply: bytes) -> bool:
        try:
            info = ServiceInfo.decode(reply)
        except CorruptionError as error:  # it must not hide the other answers
            get_default_logger().warning("ignored an answer of a service: %s", error)
            return False
        # The broker lets each role speak for itself: what it says of another is a mistake, or a forgery.
        if info.role != role:
            get_default_logger().warning("ignored %s, which answered for %s", info, role)
            return False
        services.append(info)
        return enough(info)

    session.request_many(session.subjects.who(role), asker, window_s, enough=take)
    return services


def _check_agreement(one: ServiceInfo, other: ServiceInfo) -> None:
    # Embedding workers may be added and removed while a job runs: an older one knows an older number.
    if one.replicas != other.replicas and one.role != EMBEDDING_WORKER:
        raise FailedPreconditionError(
            f"{one} and {other} disagree about the number of replicas, {one.replicas} and {other.replicas}: "
            "start all with the same --replica-size"
        )
    if one.schema and other.schema and one.schema != other.schema:
        raise FailedPreconditionError(
            f"{one} and {other} have different embedding configs, {one.schema} and {other.schema}: "
            "give all the same --embedding-config"
        )
