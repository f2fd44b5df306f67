"""Keeps a copy of a model up to date with the packets that its training writes.

Packets are applied in order, and each is checked completely before it changes anything. A packet that cannot
be applied is tried again, then reported, and never skipped: the copy stays at the packet before until this
one can be read or a newer checkpoint appears. docs/serving_clusters.md, "Following a training job".
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from persia.checkpoint.checkpoints import Source
from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    PersiaError,
    StorageError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.packets.follow_target import (
    PIN_NAME,
    FollowTarget,
    StartPoint,
    checkpoint_places,
    find_starts,
    read_target,
)
from persia.packets.log import LATEST_NAME, PacketLog
from persia.packets.packet import BaseKind, Packet
from persia.storage.location import Location
from persia.storage.position import Position

_LOCAL_POLL_S = 0.02  # a look for one file on this machine takes some 50 us
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0
_STOP_S = 10.0
_TRIAL_PAUSES = 10.0  # of the time that the trial of a held stream took, until the next one


class Copy(Protocol):
    """A model at one packet."""

    def prepare(self, packet: Packet) -> Callable[[], None]:
        """Reads and checks all of the next packet; what is returned applies it in one step.

        UnavailableError: it is not the packet's fault, and may pass. Other errors are about the packet.
        """


_Copy = TypeVar("_Copy", bound=Copy)


class Copies(Protocol[_Copy]):
    """Makes copies, and puts one in the place of another."""

    def load(self, checkpoint: Source | None) -> _Copy:
        """A new copy, beside the one in use. None: one without rows, for packets to fill."""

    def use(self, copy: _Copy, position: Position | None) -> _Copy:
        """Makes `copy` the one in use; returns the one to apply packets to. None: it is at no packet."""


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """Which packets a follower applies, and how."""

    packets: Location
    checkpoints: Location | None = None  # one, or a directory of them, besides those beside the packets
    poll_s: float = 0.25
    max_behind: int = 1000  # packets; a checkpoint that saves more than these is loaded in their place
    num_tries: int = 5  # until a packet counts as failed


@dataclass(frozen=True, kw_only=True)
class FollowStatus:
    """What a follower has applied, and what went wrong."""

    position: Position | None = None  # the last packet applied; None: no packet, nor a checkpoint with one
    latest: Position | None = None  # the last one written
    pinned: bool = False
    step: int | None = None  # of training, at `position`
    delay_s: float | None = None  # of the last packet: from its oldest update until it was visible
    num_applied: int = 0
    num_retries: int = 0  # tries to apply a packet that failed
    num_failed: int = 0  # packets that failed `num_tries` times
    num_storage_errors: int = 0
    num_checkpoints: int = 0  # loaded, the first one included
    error: str = ""  # why it cannot apply the next packet; empty: it can
    held: bool = False  # it stays at its stream, as the new one does not continue it

    @property
    def num_behind(self) -> int | None:
        """Packets between this copy and the training; None: not of one stream, or not known."""
        if self.position is None or self.latest is None or self.position.stream != self.latest.stream:
            return None
        return self.latest.number - self.position.number

    def to_json(self) -> dict[str, Any]:
        """For `/status`."""
        position = self.position
        return {
            **self.__dict__,
            "position": None if position is None else str(position),
            "stream": None if position is None else position.stream,
            "number": None if position is None else position.number,
            "latest": None if self.latest is None else str(self.latest),
            "num_behind": self.num_behind,
        }


class Follower(Generic[_Copy]):
    """Follows on a thread of its own from `start` to `close`."""

    def __init__(
        self,
        copies: Copies[_Copy],
        options: FollowOptions,
        judge: Callable[[_Copy], None] | None = None,
    ) -> None:
        """`judge` refuses copies of streams that do not continue the one in use, by FailedPreconditionError;
        None: all such copies are refused."""
        self._copies = copies
        self._judge = judge
        self._trial = ("", 0.0, "")  # stream that failed; when it is tried again, by time.monotonic(); why
        self._options = options
        self._log = PacketLog(options.packets)
        self._copy: _Copy | None = None
        self._begun_from: set[str] = set()  # the copy in use: dump id and stream of its checkpoint
        self._status = FollowStatus()
        self._num_failures = 0  # looks in a row
        self._failing: tuple[Position, int] | None = None  # a packet, and tries to apply it
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persia-follower", daemon=True)

    @property
    def status(self) -> FollowStatus:
        """May be asked by any thread."""
        return self._status

    def start(self) -> None:
        """Returns when a first copy is in use, as new as can be had; raises what is wrong with it."""
        target = read_target(self._log)
        try:
            if target is None:
                raise NotFoundError(self._no_packets())
            self._begin_anew(target, at_least=0)
        except NotFoundError as failure:
            if (target is not None and target.is_pinned) or self._options.checkpoints is None:
                raise
            self._begin_without_packets(self._options.checkpoints, failure)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        pause_s = self._options.poll_s
        while not self._wait(pause_s):
            pause_s = self._options.poll_s
            if not self._look():
                backoff_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._num_failures, 16), _LONGEST_PAUSE_S)
                # A follower that cannot proceed must not burden the storage of the training.
                pause_s = max(pause_s, backoff_s)

    def _wait(self, pause_s: float) -> bool:
        """Until the next look; True: the follower is closed. A packet in a local directory ends it early."""
        status = self._status
        if not self._log.location.is_local or status.pinned or status.error or status.position is None:
            return self._stopped.wait(pause_s)
        end = time.monotonic() + pause_s
        while (left_s := end - time.monotonic()) > 0 and not self._log.exists(status.position.next):
            if self._stopped.wait(min(left_s, _LOCAL_POLL_S)):
                return True
        return self._stopped.is_set()

    def _look(self) -> bool:
        """Applies all packets that it can; False if an error stopped it."""
        try:
            reason = self._go_on()
        except (StorageError, UnavailableError, OSError) as failure:
            # The storage or a server is unavailable: the packets are not to blame.
            self._note(failure)
            self._update(num_storage_errors=self._status.num_storage_errors + 1)
        except NotFoundError as failure:
            # Not written yet, most likely (persia_inc_stuck tells if it never is); what a pin needs is gone.
            self._note(failure, logging.ERROR if self._status.pinned else logging.INFO)
        except PersiaError as failure:
            self._note(failure)
        except Exception as failure:  # whatever it is, the copy in use stays in use
            get_default_logger().exception("following %s failed", self._log.location)
            self._note(InternalError(f"{type(failure).__name__}: {failure}"))
        else:
            self._num_failures = 0
            if self._status.error and self._status.position is not None:
                get_default_logger().info("%s is followed again, at %s", *self._where())
            self._update(error=reason)
            return True
        self._num_failures += 1
        return False

    def _note(self, failure: BaseException, level: int = logging.ERROR) -> None:
        if str(failure) != self._status.error:
            get_default_logger().log(level, "%s: %s stays in use: %s", *self._where(), failure)
        self._update(error=str(failure))

    def _where(self) -> tuple[Location, Position | str]:
        return self._log.location, self._status.position or "the checkpoint"

    def _update(self, **changes: Any) -> None:
        # Replaced, never changed: other threads read it without a lock.
        self._status = replace(self._status, **changes)

    # ---- forward, packet by packet

    def _go_on(self) -> str:
        """Follows the target. Returns why there is none, or ""."""
        target = read_target(self._log)
        if target is None:
            return self._no_packets() if self._status.position is None else ""
        self._update(latest=target.latest, pinned=target.is_pinned)
        # Another stream is another run of the trainer: its packets do not apply to these rows.
        position = self._status.position
        if position is None or target.position.stream != position.stream:
            self._take_stream(target)
            return ""
        self._update(held=False)
        if target.position > position:
            self._catch_up(target, position)
        elif target.position < position and target.is_pinned:
            self._begin_anew(target, at_least=0)
        return ""

    def _take_stream(self, target: FollowTarget) -> None:
        """Begins with a stream that starts from what is in use, that a pin names, or that passes the judge.

        FailedPreconditionError: it does none of these, and is held. A trainer that began from nothing would
        replace a trained model by an untrained one.
        """
        position, stream = self._status.position, target.position.stream
        own = self._begun_from | (set() if position is None else {position.stream})
        if target.is_pinned or not own.isdisjoint([stream, *self._log.lineage(stream)]):
            self._update(held=False)
            return self._begin_anew(target, at_least=0)
        if not self._status.held:
            self._update(held=True, error=_unrelated(stream))
        self._try_stream(target)
        self._update(held=False)

    def _try_stream(self, target: FollowTarget) -> None:
        """Begins with the stream if it passes the judge; FailedPreconditionError: it does not."""
        if self._judge is None:
            raise FailedPreconditionError(_held(target, self._log))
        stream, next_s, verdict = self._trial
        if stream == target.position.stream and time.monotonic() < next_s:
            raise FailedPreconditionError(verdict)
        started = time.monotonic()
        try:
            self._begin_anew(target, at_least=0, judge=self._judge)
        except FailedPreconditionError as failure:
            verdict = _held(target, self._log, f", and {target.position} fails the gate: {failure}")
            now = time.monotonic()
            # A trial loads rows: it must not take most of the processors, or of the storage.
            self._trial = (target.position.stream, now + _TRIAL_PAUSES * (now - started), verdict)
            raise FailedPreconditionError(verdict) from failure

    def _no_packets(self) -> str:
        return f"there are no packets in {self._log.location} yet"

    def _catch_up(self, target: FollowTarget, position: Position) -> None:
        if target.position.number - position.number > self._options.max_behind:
            try:
                self._begin_from(target, at_least=position.number + self._options.max_behind + 1)
            except (NotFoundError, CorruptionError, FailedPreconditionError) as reason:
                # Nothing would save so many packets, or it cannot be used: they may all be there.
                get_default_logger().info("%s: packets are applied instead: %s", self._log.location, reason)
        # Asked anew each time: a packet may have made `_apply_next` begin from a checkpoint, further on.
        while not self._stopped.is_set():
            position = self._status.position or position
            if position >= target.position:
                return
            self._apply_next(target, position.next)

    def _apply_next(self, target: FollowTarget, position: Position) -> None:
        assert self._copy is not None, "there is a position"
        try:
            # `prepare` reads and checks all of it; its result replaces rows. So an error replaces none.
            packet = self._log.read(position)
            if not _needs_rows(packet):
                self._copy.prepare(packet)()
        # Not counted as a try: the packet may be good, and cannot be read or applied at the moment.
        except (StorageError, UnavailableError):
            raise
        except PersiaError as failure:
            # The packet itself may be damaged, or its files may not be visible here yet: both look the same.
            if self._count_try(position) < self._options.num_tries:
                raise
            self._give_up(target, position, failure)
            return
        if _needs_rows(packet):
            self._begin_anew(target, at_least=position.number)
            return
        self._num_failures = 0
        self._update(
            position=packet.position,
            step=packet.step,
            delay_s=_delay_s(packet),
            num_applied=self._status.num_applied + 1,
        )

    def _count_try(self, position: Position) -> int:
        """How often applying the packet at `position` has failed, this time included."""
        known = self._failing
        tries = 1 if known is None or known[0] != position else known[1] + 1
        self._failing = (position, tries)
        self._num_failures = tries - 1  # pauses grow with its tries, whatever was in the way before
        is_last = tries == self._options.num_tries
        self._update(
            num_retries=self._status.num_retries + 1, num_failed=self._status.num_failed + int(is_last)
        )
        if is_last:
            get_default_logger().error("packet %s cannot be applied", position)
        return tries

    def _give_up(self, target: FollowTarget, position: Position, failure: PersiaError) -> None:
        """Loads a checkpoint that has the packet's changes; raises where there is none."""
        try:
            self._begin_anew(target, at_least=position.number)
        except NotFoundError as missing:
            raise FailedPreconditionError(
                f"packet {position} cannot be applied ({failure}), and nothing takes its place: {missing}"
            ) from failure

    # ---- anew, from a checkpoint

    def _begin_anew(
        self, target: FollowTarget, *, at_least: int, judge: Callable[[_Copy], None] | None = None
    ) -> None:
        """As `_begin_from`; its NotFoundError says what to do, too."""
        try:
            self._begin_from(target, at_least=at_least, judge=judge)
        except NotFoundError as failure:
            message = f"{failure}: wait for one, or dump a checkpoint of this training"
            if target.is_pinned:
                pin = self._log.location / PIN_NAME
                message = (
                    f"packet {target.position}, which {pin} names, cannot be reached: {failure}; "
                    f"name another one there, or remove {PIN_NAME}"
                )
            raise NotFoundError(message) from failure

    def _begin_from(
        self, target: FollowTarget, *, at_least: int, judge: Callable[[_Copy], None] | None = None
    ) -> None:
        """Loads a start point that has packet `at_least`, beside the copy in use, brings it to the target,
        and uses it if `judge` raises nothing. NotFoundError: there is no such start point.
        """
        started = time.monotonic()
        places = checkpoint_places(self._log, self._options.checkpoints, target)
        found, copy = _load_first(self._copies, find_starts(self._log, places, target.position, at_least))
        self._update(num_checkpoints=self._status.num_checkpoints + 1)
        position, packet = found.position, None
        try:
            while position < target.position and not self._stopped.is_set():
                following = self._log.read(position.next)
                if _needs_rows(following) and following.position != found.restart:
                    raise NotFoundError(f"packet {following.position} follows a checkpoint that is not there")
                copy.prepare(following)()
                position, packet = following.position, following
        except PersiaError as failure:
            now = self._status.position
            # Part of the way is better than the copy in use, unless that is newer or a pin names one packet.
            is_progress = now is None or now.stream != position.stream or now < position
            if target.is_pinned or not is_progress:
                raise
            get_default_logger().warning(
                "%s: %s is as far as it goes now: %s", self._log.location, position, failure
            )
        if judge is not None:
            judge(copy)
        # Only now: requests are served by the copy in use until this one is complete.
        self._copy = self._copies.use(copy, position)
        self._begun_from = _names(found.source)
        step = found.source.manifest.step if found.source is not None else None
        self._update(
            position=position,
            step=step if packet is None else packet.step,
            delay_s=self._status.delay_s if packet is None else _delay_s(packet),
            num_applied=self._status.num_applied + position.number - found.position.number,
        )
        get_default_logger().info(
            "%s: %s is in use, begun from %s, %.1f s later",
            self._log.location,
            position,
            "nothing" if found.source is None else found.source.location,
            time.monotonic() - started,
        )

    def _begin_without_packets(self, checkpoints: Location, reason: NotFoundError) -> None:
        source = Source(checkpoints)
        self._copy = self._copies.use(self._copies.load(source), None)
        self._begun_from = _names(source)
        self._update(
            step=source.manifest.step, num_checkpoints=self._status.num_checkpoints + 1, error=str(reason)
        )
        get_default_logger().warning("%s is in use without packets: %s", source.location, reason)


def _load_first(copies: Copies[_Copy], starts: Sequence[StartPoint]) -> tuple[StartPoint, _Copy]:
    """The first start point that can be loaded, and its copy; raises what is wrong with the last one."""
    # The newest first. A damaged checkpoint is no reason to stay behind while an older one is whole.
    for start in starts:
        try:
            return start, copies.load(start.source)
        except (CorruptionError, NotFoundError) as failure:
            get_default_logger().error("a follower cannot begin with a checkpoint: %s", failure)
            if start is starts[-1]:
                raise
    raise AssertionError("there is at least one")


def _needs_rows(packet: Packet) -> bool:
    """Whether the packet follows other rows than those at the packet before."""
    return packet.base is not None and packet.base.kind is not BaseKind.NOTHING


def _unrelated(stream: str) -> str:
    return f"stream {stream} does not start from what is in use"


def _held(target: FollowTarget, log: PacketLog, verdict: str = "") -> str:
    return (
        f"{_unrelated(target.position.stream)}{verdict}: to take it, copy {log.location / LATEST_NAME} to "
        f"{PIN_NAME} beside it, and remove {PIN_NAME} once this follower is there; to keep the old one, "
        "resume the training from its checkpoint"
    )


def _names(source: Source | None) -> set[str]:
    """The names of a checkpoint in the lineage of streams: its dump id, and the stream that it is of."""
    section = None if source is None else source.manifest.embeddings
    if section is None:
        return set()
    return {section.dump_id} | (set() if section.packets is None else {section.packets.stream})


def _delay_s(packet: Packet) -> float:
    return max(0.0, time.time() - packet.changed_after)
