"""The standby of a parameter server: a second copy of its rows, which replaces it when it dies (ADR 41).

The native server copies rows and replicates operations, and a lease keeps a primary from answering after
its standby may have taken over. This module decides who is the primary of an index. Each process of the
index has a subject of its own, and answers there until it ends:

* A standby asks its primary five times a second. It takes over when the primary says that it has left; when
  its port is closed and the broker says that it has gone; or when neither RPC nor the broker has brought an
  answer for the deadline, though the broker answers.
* A primary whose standby takes no operations answers nothing. It continues alone if the standby agrees to
  end; if its port is closed and the broker says that it has gone; or when it is too late for the standby to
  take over, which it does only for a limited time after its primary has last said that it replicates.
* A primary that was replaced ends, with an error that names its successor.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

from persia import env
from persia.checkpoint.protocol import Request, Verb
from persia.checkpoint.service import CheckpointService
from persia.config.global_config import EmbeddingParameterServerConfig
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PersiaError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging.discovery import Advertiser, Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.replica import (
    PROBE_S,
    Message,
    Presence,
    Question,
    Replica,
    Sign,
    starts_as_standby,
)
from persia.waiting import Attempts

__all__ = ["Pair", "Primary", "Standby"]

_POLL_S = 0.2
_ATTACH_S = 2.0
_COPY_S = 5.0  # how long a dump waits for the copy of a new standby
# Of a process that has lost its index to its standby. An orderly end would say that the server has left.
_REPLACED_EXIT_CODE = 3
# In deadlines, and with seconds for questions on a busy machine: how long after its last confirmation a
# standby may take over, and when a primary relies on that it does not any more.
_ELIGIBLE, _ELIGIBLE_SLACK_S = 1.5, 3.0
_TOO_LATE, _TOO_LATE_SLACK_S = 2.0, 6.0
# How long a server has run without a pause when a newcomer that has not heard it is the one that errs.
_PRESENT_S = 15.0


class Primary:
    """The side of the server of an index, from its creation to `close`. Thread-safe."""

    def __init__(
        self, replica: Replica, config: str, deadline_s: float, checkpoints: CheckpointService
    ) -> None:
        self._replica, self._server = replica, replica.server
        self._config, self._deadline_s, self._checkpoints = config, deadline_s, checkpoints
        self._lock = threading.RLock()  # of attaching, releasing and loading
        self._standby: Message | None = None
        self._has_copy = False
        self._answered_at = time.monotonic()
        self._presence = Presence(replica.session)
        self._is_closing = threading.Event()
        self._started = contextlib.ExitStack()  # of what `start` has started, also where it fails
        replica.handle(Question.ATTACH, self._attach)
        replica.handle(Question.POLL, self._poll)
        # Discovery does not find one that does not serve.
        replica.handle(Question.WHO, lambda _: self._server.replication != "fenced")

    def start(self, advertiser: Advertiser) -> None:
        """Once the server is advertised."""

        def on_event(event: ServiceEvent) -> None:
            info = event.info
            is_other = info.index == self._replica.index and info.incarnation != self._server.incarnation
            if event.kind is not EventKind.JOINED or not is_other or self._is_closing.is_set():
                return
            if info.term < advertiser.info.term:
                # The predecessor has returned, and ends. Who has believed it must not look for it.
                advertiser.publish_again()
            elif info.has_rows or self._presence.lasts_s() < _PRESENT_S:
                self._end(str(info))
            else:  # a newcomer without rows, which has not heard this server, and ends
                advertiser.outrank(info)

        watch = Directory(self._replica.session).watch(EMBEDDING_PARAMETER_SERVER, on_event)
        self._started.callback(watch.close)
        # What one of them has answered to this advertisement may have come before the watch.
        for info in self._replica.others():
            on_event(ServiceEvent(EventKind.JOINED, info))
        thread = threading.Thread(target=self._run, args=(advertiser,), name="persia-standby", daemon=True)
        thread.start()
        self._started.callback(thread.join)

    def close(self) -> None:
        """Answers nothing any more, and hands over to the standby."""
        self._is_closing.set()
        self._started.close()
        standby, state = self._standby, self._server.replication
        if standby is None:
            return
        # Also where the standby cannot take over: requests that wait for it would hold the end.
        self._server.fence("this parameter server has stopped")
        if state in ("replicating", "stalled"):
            with contextlib.suppress(PersiaError):
                self._replica.ask(Question.LEFT, standby.incarnation)

    def status(self) -> dict[str, str]:
        """For the status of the server."""
        standby = self._standby
        address = "" if standby is None else standby.address
        return {"replication": self._server.replication, "standby": address}

    def handle_checkpoint(self, payload: bytes) -> bytes:
        """`handle` of the CheckpointService. A load changes rows without an operation: the standby is
        released before, and copies the loaded rows afterwards. A dump waits for a copy. UnavailableError:
        another server may have replaced this one; ask again.
        """
        verb = Request.decode(payload).verb
        if verb in (Verb.DUMP, Verb.TAKE):
            self._await_copy()
        # The successor answers on the same subject, and writes the same files.
        if not self._replica.is_serving:
            raise UnavailableError("this parameter server waits for its standby, which may have replaced it")
        if verb is not Verb.LOAD:
            return self._checkpoints.handle(payload)
        with self._lock:
            self._release_for_load()
            return self._checkpoints.handle(payload)

    def _await_copy(self) -> None:
        for _ in Attempts(_COPY_S):
            if self._server.replication != "copying":
                return
        raise ResourceExhaustedError(
            "this server is busy with the copy of its rows for a new standby; one operation runs at a time"
        )

    def _release_for_load(self) -> None:
        standby = self._standby
        if standby is None:
            return
        _, answer = self._replica.ask(Question.END, standby.incarnation)
        if answer is None or not answer.agrees:
            raise UnavailableError(
                f"the standby at {standby.address} does not answer, and a load changes the rows of both: "
                "load again, or stop the standby"
            )
        self._release(standby, "it copies the rows that are loaded now")

    def _attach(self, message: Message) -> bool:
        if message.config != self._config:
            raise InvalidArgumentError(
                f"the standby at {message.address} has another config ({message.config}) than its primary "
                f"({self._config}): start both with the same --global-config, --embedding-config and "
                "--replica-size"
            )
        with self._lock:
            known = self._standby
            if known is not None and known.incarnation == message.incarnation:
                return True
            if self._checkpoints.is_loading:
                raise FailedPreconditionError("a checkpoint is being loaded: attach the standby afterwards")
            if known is not None and known.address == message.address:
                self._release(known, "it was started again")  # its port is that of the new process
            # Before: once it is attached, its loss must be noticed.
            self._has_copy, self._answered_at = False, time.monotonic()
            self._server.attach_standby(message.address, int(message.incarnation, 16))
            self._standby = message
        return True

    def _poll(self, message: Message) -> bool | None:
        # No answer: END and LEFT tell the standby what it must do, and until then it has every row.
        state = self._server.replication
        if state in ("broken", "fenced"):
            return None
        standby = self._standby
        if standby is None or standby.incarnation != message.incarnation:
            return False
        # Before the answer: the standby counts from when it asked.
        self._answered_at = time.monotonic()
        return state in ("copying", "replicating", "stalled")

    def _run(self, advertiser: Advertiser) -> None:
        while not self._is_closing.wait(_POLL_S / 2):
            advertiser.publish_if_missed()
            standby, state = self._standby, self._server.replication
            self._presence.lasts_s()
            if standby is None:
                continue
            if state == "replicating" and not self._has_copy:
                self._has_copy = True
                get_default_logger().info("the standby at %s has every row and change", standby.address)
            if state in ("broken", "stalled"):
                try:
                    self._resolve(standby, is_broken=state == "broken")
                except PersiaError as error:  # the broker is away: the next try, until it is back
                    self._presence.end()
                    get_default_logger().info("the standby at %s is not asked: %s", standby.address, error)

    def _resolve(self, standby: Message, *, is_broken: bool) -> None:
        """Continues alone, or ends, as soon as it is certain that the standby does not take over, or has."""
        # At first: a pause in what follows must not count as a time in which the standby was asked.
        silent_s = self._presence.lasts_s(self._answered_at)
        sign, answer = self._replica.ask(Question.END if is_broken else Question.WHO, standby.incarnation)
        self._presence.lasts_s()  # each question may take long on a busy host, which is no pause
        if is_broken and answer is not None:
            if not answer.agrees:
                self._end(f"its standby at {answer.address}")
            return self._release(standby, "it agreed to end")
        if others := self._replica.others():
            return self._end(str(max(others, key=lambda info: info.term)))
        self._presence.lasts_s()
        if not self._replica.reaches_broker():
            return self._presence.end()
        if sign is Sign.GONE and self._replica.has_ended(standby.address, standby.incarnation):
            self._release(standby, "it has ended")
        elif is_broken and silent_s > _TOO_LATE * self._deadline_s + _TOO_LATE_SLACK_S:
            self._release(standby, f"it has not answered for {silent_s:.0f} s")

    def _release(self, standby: Message, reason: str) -> None:
        with self._lock:
            if self._standby is not standby:  # another one by now, which has not lost anything
                return
            self._server.release_standby()
            self._standby = None
        get_default_logger().warning(
            "the standby at %s has no copy any more (%s): training continues without it",
            standby.address,
            reason,
        )

    def _end(self, successor: str) -> None:
        reason = f"{EMBEDDING_PARAMETER_SERVER} {self._replica.index} was replaced by {successor}"
        self._server.fence(reason)
        get_default_logger().error("%s: this process, at %s, ends", reason, self._replica.address)
        os._exit(_REPLACED_EXIT_CODE)


class Standby:
    """The side of a standby: `follow` returns when it has taken over, or was released."""

    def __init__(self, replica: Replica, config: str, deadline_s: float, *, is_forced: bool) -> None:
        """`is_forced`: it waits for a primary, even if no server has the rows of the index."""
        self._replica, self._server, self._config = replica, replica.server, config
        self._deadline_s, self._is_forced = deadline_s, is_forced
        self._sign = Sign.UNKNOWN
        self._primary: ServiceInfo | None = None
        self._has_left = threading.Event()
        self._asked_on = 0  # the connection by which the primary was asked last
        self._has_ended = False  # the primary listens no more: it does nothing that this standby misses
        # When the primary has said last that it replicates to this standby, and the connection it came by.
        self._confirmed: tuple[float, int] = (float("-inf"), 0)
        replica.handle(Question.END, self._on_end)
        replica.handle(Question.LEFT, self._on_left)

    @property
    def primary(self) -> ServiceInfo:
        """Whom this standby follows, or has replaced."""
        assert self._primary is not None
        return self._primary

    def status(self) -> dict[str, str]:
        primary = self._primary
        return {
            "replication": f"standby, {self._server.standby_state}",
            "primary": "" if primary is None else primary.address,
        }

    def follow(self) -> bool:
        """True: this process has taken over. False: it was released, and may become a standby again.

        FailedPreconditionError: the rows of this standby are not certainly those of its primary;
        InvalidArgumentError: it has another config. Both end it.
        """
        if not self._attach():
            return False
        while True:
            self._has_left.wait(_POLL_S)
            state = self._server.standby_state
            if state == "unfit":
                raise FailedPreconditionError(
                    f"an operation of the primary failed at this standby: {self._server.standby_failure}. "
                    "Its rows differ from now on, so it ends: start it again for a new copy"
                )
            if state == "renounced" or not self._confirm():
                self._server.renounce()
                return False
            try:
                if self._is_dead() and self._take_over():
                    return True
            except UnavailableError as error:  # the broker is away: the next try
                get_default_logger().info(
                    "the primary at %s is not replaced: %s", self.primary.address, error
                )

    def _attach(self) -> bool:
        """False: no server has the rows of the index, so that there is nothing to copy."""
        name = f"{EMBEDDING_PARAMETER_SERVER} {self._replica.index} that this standby belongs to"
        refusal: PersiaError | None = None
        directory = Directory(self._replica.session)
        attempts = Attempts(env.get_deadline_s(), pause_s=_POLL_S, waiting_for=lambda: f"{name} ({refusal})")
        for _ in attempts:
            # The answer of a primary that has died since, or does not reach the broker, may be lost.
            if self._server.has_copy:
                return True
            info = directory.probe(EMBEDDING_PARAMETER_SERVER, self._replica.index, PROBE_S)
            if info is None:
                if not self._is_forced and self._has_no_primary():
                    return False
                continue
            connection, asked_at = self._replica.session.num_reconnects, time.monotonic()
            if self._primary is None or self._primary.incarnation != info.incarnation:
                self._confirmed = asked_at, connection  # what it copies, it copies after this
            self._primary = info
            self._server.follow(info.incarnation)
            if self._server.standby_state == "unfit":  # it holds operations of another primary
                return False
            try:
                _, answer = self._replica.ask(
                    Question.ATTACH,
                    f"{info.incarnation:016x}",
                    config=self._config,
                    timeout_s=_ATTACH_S,
                )
            except FailedPreconditionError as error:  # it has another standby, or is being dumped
                refusal = error
                attempts.progressed()
                continue
            if answer is not None and answer.agrees:
                self._confirmed = asked_at, connection
                return True
        raise DeadlineExceededError(f"{name} has not accepted it within PERSIA_DEADLINE_SEC: {refusal}")

    def _has_no_primary(self) -> bool:
        """Whether certainly no process has the rows of the index."""
        replica = self._replica
        # Its own answer does not count: it may have copied rows before its primary has ended.
        if starts_as_standby(replica.session, replica.index, replica.incarnation):
            return False
        if self._primary is None:
            return True
        # One that is frozen, or cut off, has all rows, and must not lose its index to an empty server.
        return replica.has_ended(self._primary.address, f"{self._primary.incarnation:016x}")

    def _on_end(self, message: Message) -> bool | None:
        if self._primary is None or message.incarnation != f"{self._primary.incarnation:016x}":
            return None
        return self._server.renounce()

    def _on_left(self, message: Message) -> bool:
        if self._primary is not None and message.incarnation == f"{self._primary.incarnation:016x}":
            self._has_left.set()
        return self._has_left.is_set()

    def _confirm(self) -> bool:
        """Asks the primary; False: it replicates to others, or to none."""
        self._asked_on = connection = self._replica.session.num_reconnects
        asked_at = time.monotonic()
        self._sign, answer = self._replica.ask(Question.POLL, f"{self.primary.incarnation:016x}")
        if answer is not None and answer.agrees:
            self._confirmed = asked_at, connection
        # One that has left says no, because it answers nothing any more.
        return answer is None or answer.agrees or self._has_left.is_set()

    def _is_dead(self) -> bool:
        """Two signs are needed, unless the primary itself has said so."""
        if self._has_left.is_set():
            return True
        if self._sign in (Sign.ANSWERED, Sign.UNKNOWN):
            return False
        self._has_ended = self._sign is Sign.GONE and self._replica.has_ended(
            self.primary.address, f"{self.primary.incarnation:016x}"
        )
        if self._has_ended:
            return True
        silent_s = min(self._server.silent_for_s, time.monotonic() - self._confirmed[0])
        if silent_s <= self._deadline_s or not self._replica.reaches_broker():
            return False
        # What was asked before a cut was not delivered, and its silence says nothing.
        return self._asked_on == self._replica.session.num_reconnects

    def _take_over(self) -> bool:
        """False: not yet. The lease of the primary may be valid, or it has answered just now."""
        if not self._has_left.is_set():
            confirmed_at, connection = self._confirmed
            # One that has ended was only cut off at first, from a broker that was away, for instance.
            eligible = _TOO_LATE if self._has_ended else _ELIGIBLE
            eligible_s = eligible * self._deadline_s + _ELIGIBLE_SLACK_S
            # What was said before a cut may be out of date: the primary may have gone on alone meanwhile. Not
            # so soon, if it has ended: both die together with the broker, or while it is away.
            is_cut = not self._has_ended and connection != self._replica.session.num_reconnects
            if is_cut or time.monotonic() - confirmed_at > eligible_s:
                raise FailedPreconditionError(
                    f"the primary at {self.primary.address} has died after this standby lost sight of it: it "
                    "may have changed without this standby, which ends"
                )
            # One that has gone cannot answer; whether another server has come is asked below.
            if self._sign is not Sign.GONE and (others := self._replica.others()):
                if all(info.incarnation == self.primary.incarnation for info in others):
                    return False
                raise FailedPreconditionError(f"{others[0]} is the server of this index: this standby ends")
        try:
            self._server.take_over(self._has_left.is_set())
        except UnavailableError:
            return False
        if not self._has_left.is_set():
            self._check_succession()
        get_default_logger().error("%s has died: its standby takes over", self.primary)
        return True

    def _check_succession(self) -> None:
        """Again, before others know the successor: to apply the log, or a pause, may have taken long."""
        confirmed_s = time.monotonic() - self._confirmed[0]
        incarnation = f"{self.primary.incarnation:016x}"
        _, answer = self._replica.ask(Question.POLL, incarnation)
        has_continued = bool(self._replica.others()) or (answer is not None and not answer.agrees)
        # From then on a primary that is only cut off may continue alone.
        is_late = confirmed_s > _TOO_LATE * self._deadline_s + _ELIGIBLE_SLACK_S
        if has_continued or (is_late and not self._replica.has_ended(self.primary.address, incarnation)):
            raise FailedPreconditionError(
                f"the primary at {self.primary.address} may have continued without this standby, which has "
                f"its word of {confirmed_s:.0f} s ago and ends"
            )


def _new_term() -> int:
    # Rises from each server of an index to the next. The time, as no process remembers the last one once all
    # have ended: so the clocks of the hosts must agree.
    return int(time.time() * 1000)


class Pair:
    """One process of an index: at first its standby, if another process has the rows, then its server."""

    def __init__(self, replica: Replica, config: str, section: EmbeddingParameterServerConfig) -> None:
        self._replica, self._config = replica, config
        self._deadline_s = section.standby_deadline_sec
        self._standby: Standby | None = None
        self._primary: Primary | None = None
        self.term = _new_term()
        self.replaces = 0

    def follow(self, *, is_forced: bool) -> bool:
        """As `Standby.follow`."""
        self._standby = Standby(self._replica, self._config, self._deadline_s, is_forced=is_forced)
        if not self._standby.follow():
            return False
        replaced = self._standby.primary
        # The time of now: the predecessor may have outranked others since this standby found it.
        self.replaces, self.term = replaced.incarnation, max(_new_term(), replaced.term + 1)
        return True

    def lead(self, checkpoints: CheckpointService) -> None:
        """From now on this process is the server of its index. `start` once it is advertised."""
        self._primary = Primary(self._replica, self._config, self._deadline_s, checkpoints)

    def advertisement(self) -> dict[str, Any]:
        """More arguments of `advertised`."""
        return {
            "term": self.term,
            "replaces": self.replaces,
            "is_serving": lambda: self._replica.is_serving,
        }

    def start(self, advertiser: Advertiser) -> None:
        self._side.start(advertiser)

    def handle_checkpoint(self, payload: bytes) -> bytes:
        return self._side.handle_checkpoint(payload)

    def close(self) -> None:
        self._side.close()

    def status(self) -> dict[str, str]:
        side = self._primary or self._standby
        return {} if side is None else side.status()

    @property
    def _side(self) -> Primary:
        assert self._primary is not None
        return self._primary
