"""Writes packets of changes while a job trains: when enough has changed, or time has passed, and at the end.

A thread of its own, in the process that also coordinates checkpoints; training only copies its dense model
when asked to. What goes wrong is logged and counted and tried again; changes that a failed packet had come
with the next one. Where changes are lost, a restart says so in the sequence and a whole checkpoint follows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from persia.checkpoint.checkpoints import Checkpoints
from persia.checkpoint.peers import Peer
from persia.embedding.deadline import Deadline
from persia.errors import DeadlineExceededError, FailedPreconditionError, PersiaError
from persia.logger import get_default_logger
from persia.packets.changes import IncrementalSettings
from persia.packets.log import PacketLog
from persia.packets.operation import (
    ChangeStatus,
    DenseState,
    PacketOperation,
    ask_changes,
    begin_stream,
)
from persia.packets.packet import Base, BaseKind, CheckpointReference, Packet
from persia.storage.location import Location
from persia.storage.manifest import EmbeddingSection
from persia.storage.position import Position, make_stream_id

__all__ = ["DENSE_FILE", "PacketCounts", "PacketWriter"]

DENSE_FILE = "dense.pt"

_LONGEST_TICK_S = 0.1
_STATUS_DEADLINE_S = 5.0  # asked for again and again, and a dump may wait for it
_CONNECT_S = 5.0  # at the end, for a job so short that the servers have not answered yet
_LONGEST_PAUSE_S = 30.0  # between tries after failures
_SHARE_OF_CHECKPOINTS = 0.1  # of the time, at most, that checkpoints take which this writes
_KEEP_CHECKPOINTS = 2
_SETTLE_S = 1.0  # after the last change of other ranks, at the end
_LONGEST_SETTLING_S = 10.0


@dataclass(frozen=True, kw_only=True)
class PacketCounts:
    """What a writer has done so far."""

    packets: int = 0  # with rows
    rows: int = 0  # in them, changed and removed
    bytes: int = 0
    failures: int = 0  # tries
    restarts: int = 0
    checkpoints: int = 0  # that it wrote because followers needed one
    number: int = 0  # of the newest packet
    lag_s: float = 0.0  # age of the oldest change that is in no packet yet, at most


class PacketWriter:
    """The packets of one job. A `ChangeFeed` for the job's `Checkpoints`. Thread-safe."""

    def __init__(
        self,
        find_peers: Callable[[], Sequence[Peer]],
        *,
        deadline_s: float,
        step: Callable[[], int],
        num_trainers: int = 1,
    ) -> None:
        """`find_peers`: all servers, by index. `step`: of the training loop; called on another thread."""
        self._find_peers = find_peers
        self._deadline_s = deadline_s
        self._step = step
        self._num_trainers = num_trainers
        self._peers: Sequence[Peer] = ()
        self._log: PacketLog | None = None
        self._settings: IncrementalSettings | None = None
        self._checkpoints = Checkpoints(find_peers, deadline_s=deadline_s)
        self._checkpoints.feed = self

        self._gate = threading.Lock()  # held by a packet, a dump or a load; guards what follows
        self._position = Position(make_stream_id(), 0)
        self._restart: Base | None = None  # to be written before the next packet: changes follow it already
        self._lost: str | None = None  # why the changes do not follow the last packet
        self._checkpoint: CheckpointReference | None = None
        self._needs_checkpoint_at: int | None = None  # or later: its position
        self._last_try_failed = False
        self._changed_after = time.time()
        self._packet_at = time.monotonic()

        self._offered: tuple[int, Callable[[], bytes]] | None = None
        self._dense: DenseState | None = None  # the newest that is known here
        self._dense_at = float("-inf")
        self.wants_dense = False  # read by the training thread, without a lock

        self._counts = PacketCounts()
        self._has_changes = False
        self._next_checkpoint = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persia-packets", daemon=True)

    def start(self) -> None:
        """Asks the servers whether packets are wanted, and writes them if so."""
        self._thread.start()

    @property
    def position(self) -> Position:
        """The newest packet; number 0: there is none yet."""
        return self._position

    @property
    def log(self) -> PacketLog | None:
        """Where packets go; None: this job writes none, or does not know yet."""
        return self._log

    def counts(self) -> PacketCounts:
        lag_s = time.time() - self._changed_after if self._has_changes else 0.0
        return replace(self._counts, number=self._position.number, lag_s=lag_s)

    def offer_dense(self, step: int, encode: Callable[[], bytes]) -> None:
        """When `wants_dense`: the dense model as it is now; `encode` makes a file of it, on any thread."""
        self._offered, self.wants_dense = (step, encode), False

    def close(self, timeout_s: float | None) -> None:
        """Writes the last packet, and a checkpoint when followers need one. None: however long it takes, but
        not longer than the job's deadline without any progress."""
        self._stop.set()
        if self._thread.ident is None:
            return
        began_at = time.monotonic()
        self._thread.join(_CONNECT_S if timeout_s is None else min(timeout_s, _CONNECT_S))
        if self._settings is None:  # nobody knows whether packets are wanted
            return
        if timeout_s is None:
            self._join_while_it_gets_on()
        else:
            self._thread.join(max(0.0, began_at + timeout_s - time.monotonic()))
        if self._thread.is_alive():
            lost = "the last changes are in no packet" if self._has_changes else "no checkpoint is written"
            get_default_logger().warning("%s: there was no time for it", lost)

    def _join_while_it_gets_on(self) -> None:
        """Servers that hang are found by operations; storage may hang this process' own calls."""
        began_at = time.monotonic()
        while self._thread.is_alive():
            progress_at = max(began_at, self._packet_at, self._checkpoints.progress_at)
            left_s = progress_at + self._deadline_s - time.monotonic()
            if left_s <= 0:
                return
            self._thread.join(left_s)

    # ---- as a ChangeFeed

    def pause(self) -> Position | None:
        if not self._gate.acquire(timeout=self._deadline_s):
            raise DeadlineExceededError(
                f"a packet of changes was not written within {self._deadline_s:g} s (PERSIA_DEADLINE_SEC)"
            )
        if self._settings is None:
            return None
        try:
            if self._restart is not None:  # what is dumped now is newer than it
                self._write_restart(self._restart)
        except PersiaError as failure:  # then followers cannot begin with this dump
            get_default_logger().warning("a restart of the packets was not written: %s", failure)
        except BaseException:
            self.resume()
            raise
        return self._position

    def resume(self) -> None:
        self._gate.release()

    def dumped(self, target: Location, section: EmbeddingSection, *, has_dense: bool) -> None:
        if not has_dense:  # rows alone are nothing that a served model can begin with
            return
        if section.packets is None or section.packets.stream != self._position.stream:
            return
        number = section.packets.number
        self._checkpoint = CheckpointReference(url=str(target), dump_id=section.dump_id, number=number)
        if self._needs_checkpoint_at is not None and number >= self._needs_checkpoint_at:
            self._needs_checkpoint_at = None
        threading.Thread(target=self._remove_old, args=(number,), name="persia-tidy", daemon=True).start()

    def loaded(self, section: EmbeddingSection, *, may_have_changed: bool) -> None:
        if self._settings is None:
            return
        try:
            self._begin_anew()
        except PersiaError as failure:  # followers will need a checkpoint that is still to be written
            get_default_logger().warning("packets do not follow the checkpoint that was loaded: %s", failure)
            return
        if may_have_changed:  # between the loading and now, of which nothing is remembered
            self._restart = Base(
                kind=BaseKind.POSITION, reason="a checkpoint was loaded while training went on"
            )
        else:
            self._restart = Base(
                kind=BaseKind.CHECKPOINT, reason="a checkpoint was loaded", dump_id=section.dump_id
            )
        self._needs_checkpoint_at = None

    # ---- the thread

    def _run(self) -> None:
        pause_s = 0.0
        while self._settings is None:
            try:
                if not self._connect():
                    return
            except PersiaError as failure:
                get_default_logger().debug("packets of changes: %s", failure)
                if self._stop.wait(1.0):
                    return
        tick_s = min(_LONGEST_TICK_S, self._settings.interval_s / 4)
        while not self._stop.wait(max(tick_s, pause_s)):
            pause_s = 0.0 if self._survives(self._tick) else min(max(1.0, 2 * pause_s), _LONGEST_PAUSE_S)
        self._survives(self._finish)

    def _survives(self, action: Callable[[], None]) -> bool:
        try:
            action()
            return True
        except PersiaError as failure:
            get_default_logger().error("no packet of changes was written: %s", failure)
        except Exception:
            get_default_logger().exception("no packet of changes was written")
        self._last_try_failed = True
        self._counts = replace(self._counts, failures=self._counts.failures + 1)
        return False

    def _connect(self) -> bool:
        """Finds out whether this job writes packets."""
        self._peers = self._find_peers()
        settings = {status.settings for status in ask_changes(self._peers, self._deadline_s)}
        if len(settings) > 1:
            get_default_logger().error("the servers disagree about incremental updates: start them alike")
            return False
        found = settings.pop()
        if found is None:
            return False
        with self._gate:
            self._log, self._settings = PacketLog(found.directory), found
        get_default_logger().info("packets of changes go to %s", self._log.location)
        return True

    def _tick(self) -> None:
        if not self._gate.acquire(blocking=False):
            return  # a dump or a load is under way
        try:
            statuses = self._ask()
            if self._is_due(statuses):
                self._write(statuses)
        finally:
            self._gate.release()
        self._checkpoint_if_needed()

    def _finish(self) -> None:
        """Packets until nothing changes any more: other ranks end at other moments."""
        settle = Deadline(_LONGEST_SETTLING_S)
        last_change = time.monotonic()
        while True:
            self.pause()
            try:
                statuses = self._ask()
                if self._has_changes or (self._offered is not None and self._position.number > 0):
                    last_change = time.monotonic()
                    self._write(statuses)
            finally:
                self.resume()
            has_settled = self._num_trainers == 1 or time.monotonic() - last_change > _SETTLE_S
            if has_settled or settle.over:
                break
            time.sleep(_LONGEST_TICK_S)
        self._checkpoint_if_needed()

    def _ask(self) -> list[ChangeStatus]:
        asked_at = time.time()
        statuses = ask_changes(self._peers, min(self._deadline_s, _STATUS_DEADLINE_S))
        self._has_changes = any(status.num_rows > 0 for status in statuses)
        if not self._has_changes:
            self._changed_after = asked_at
        return statuses

    def _is_due(self, statuses: Sequence[ChangeStatus]) -> bool:
        assert self._settings is not None, "connected"
        num_rows = max(status.num_rows for status in statuses)
        if time.monotonic() - self._dense_at >= self._settings.dense_interval_s and self._offered is None:
            self.wants_dense = True
        if num_rows >= self._settings.buffer_size:
            return True
        return num_rows > 0 and time.monotonic() - self._packet_at >= self._settings.interval_s

    # ---- with the gate held

    def _write(self, statuses: Sequence[ChangeStatus]) -> None:
        self._follow(statuses)
        if self._restart is not None:
            self._write_restart(self._restart)
        self._write_packet()

    def _follow(self, statuses: Sequence[ChangeStatus]) -> None:
        """Sees to it that the changes of all servers are this stream's and follow its last packet."""
        stream, log = self._position.stream, self._require_log()
        if self._last_try_failed and log.exists(self._position.next):
            # It is there against all that was known, and the changes in it have come back.
            self._position, self._lost = self._position.next, f"packet {self._position.next} had failed"
        self._last_try_failed = False
        is_first = self._position.number == 0 and self._restart is None
        if self._lost is None and all(status.stream == stream for status in statuses) and not is_first:
            return
        if is_first and all(status.is_from_start or status.stream == stream for status in statuses):
            begin_stream(self._peers, stream, self._deadline_s, anew=False)
            self._restart = Base(kind=BaseKind.NOTHING, reason="training begins without rows")
            return
        reason = self._lost or ("there were rows before" if is_first else "a server has lost changes")
        self._begin_anew()
        self._restart = Base(kind=BaseKind.POSITION, reason=reason)

    def _begin_anew(self) -> None:
        """From now on changes follow a checkpoint that is begun from now on."""
        self._lost = self._lost or "changes were begun anew"  # unless all servers hear it
        begin_stream(self._peers, self._position.stream, self._deadline_s, anew=True)
        self._lost, self._changed_after = None, time.time()

    def _write_restart(self, base: Base) -> None:
        position = self._position.next
        if position.number > 1:
            get_default_logger().warning("followers cannot go on by packets alone: %s", base.reason)
        packet = Packet(
            position=position,
            changed_after=self._changed_after,
            cut_at=time.time(),
            step=self._step(),
            base=base,
            checkpoint=self._checkpoint,
        )
        self._require_log().add(packet)
        self._position, self._restart = position, None
        self._needs_checkpoint_at = position.number if base.kind is BaseKind.POSITION else None
        self._counts = replace(self._counts, restarts=self._counts.restarts + 1)

    def _write_packet(self) -> None:
        dense = self._take_offered()
        position, began_at = self._position.next, time.time()
        operation = PacketOperation(
            position.make_folder(),
            self._peers,
            self._deadline_s,
            log=self._require_log(),
            position=position,
            changed_after=self._changed_after,
        )
        packet = operation.run(step=self._step(), dense=dense, checkpoint=self._checkpoint)
        self._position, self._changed_after = position, began_at
        if packet.is_from_nothing and not operation.is_committed:
            # Its changes would come with the clearing once more, those of the others without.
            self._lost = "a server has perhaps not heard that the clearing of its rows is written"
        self._packet_at, self._has_changes = time.monotonic(), False
        if dense is not None:
            self._dense, self._dense_at = dense, self._packet_at
        counts = self._counts
        self._counts = replace(
            counts,
            packets=counts.packets + 1,
            rows=counts.rows + packet.num_rows,
            bytes=counts.bytes + packet.num_bytes,
        )

    def _take_offered(self) -> DenseState | None:
        """The dense model for this packet, when a new one is there."""
        offered, self._offered = self._offered, None
        if offered is None:
            return None
        step, encode = offered
        return DenseState(files={DENSE_FILE: encode()}, step=step)

    # ---- checkpoints that followers need

    def _checkpoint_if_needed(self) -> None:
        assert self._settings is not None, "connected"
        begin = 0 if self._checkpoint is None else self._checkpoint.number
        is_long = self._position.number - begin >= self._settings.keep_packets
        if (self._needs_checkpoint_at is None and not is_long) or time.monotonic() < self._next_checkpoint:
            return
        if self._dense is None and not self._stop.is_set():
            self.wants_dense = self._offered is None
            return
        self._dump_checkpoint()

    def _dump_checkpoint(self) -> None:
        began_at = time.monotonic()
        try:
            self._checkpoints.dump(
                self._require_log().checkpoints,
                dense=None if self._dense is None else self._dense.files,
                step=self._step(),
                keep_last=_KEEP_CHECKPOINTS,
                keep_small_rows=True,  # it comes at any time: to remove them would change the training
                blocking=False,  # without a bar
            )
            self._checkpoints.wait_for_dump()
        finally:
            took_s = time.monotonic() - began_at
            self._next_checkpoint = time.monotonic() + took_s / _SHARE_OF_CHECKPOINTS
        self._counts = replace(self._counts, checkpoints=self._counts.checkpoints + 1)

    def _remove_old(self, number: int) -> None:
        """Packets up to `number` that a checkpoint has taken the place of, but for the last ones."""
        assert self._settings is not None, "there is a checkpoint"
        log = PacketLog(self._require_log().location)  # on a thread of its own
        try:
            last = min(number, self._position.number - self._settings.keep_packets)
            log.remove_until(Position(self._position.stream, last))
        except PersiaError as failure:
            get_default_logger().warning("old packets stay behind: %s", failure)

    def _require_log(self) -> PacketLog:
        if self._log is None:
            raise FailedPreconditionError("this job writes no packets")
        return self._log
