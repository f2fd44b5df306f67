"""The stream of packets that one run of a trainer writes: its last packet, and what the next one follows.

The next packet repeats the changes of a failed one. Where changes are lost, a restart in the stream says so,
and followers need a whole checkpoint that is newer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from persia.checkpoint.checkpoints import DumpHook
from persia.checkpoint.peers import Peer
from persia.errors import DeadlineExceededError, FailedPreconditionError, PersiaError
from persia.logger import get_default_logger
from persia.packets.changes import IncrementalSettings
from persia.packets.log import PacketLog
from persia.packets.operation import ChangeStatus, DenseState, PacketOperation, ask_changes, begin_stream
from persia.packets.packet import Base, BaseKind, CheckpointReference, Packet
from persia.storage.location import Location
from persia.storage.manifest import EmbeddingSection
from persia.storage.position import Position, make_stream_id

_STATUS_DEADLINE_S = 5.0  # short: the question is repeated, and a dump may wait for its answer


@dataclass(kw_only=True)
class PacketCounts:
    """Totals of a writer."""

    packets: int = 0  # with rows
    rows: int = 0  # in them, changed and removed
    bytes: int = 0
    failures: int = 0  # tries
    restarts: int = 0
    checkpoints: int = 0  # that it wrote because followers needed one
    number: int = 0  # of the newest packet
    lag_s: float = 0.0  # age of the oldest change that is in no packet yet, at most


class PacketStream(DumpHook):
    """Writes the packets of a stream one by one, and pauses them around dumps and loads.

    `pause` and `resume` are thread-safe. Other calls need the pause, by this class's own `with` statement.
    """

    def __init__(self, *, deadline_s: float, step: Callable[[], int]) -> None:
        """`step` returns the step of the training loop, on any thread."""
        self.peers: Sequence[Peer] = ()
        self.log: PacketLog | None = None  # None: this job writes no packets, or does not know yet
        self.settings: IncrementalSettings | None = None
        self.position = Position(make_stream_id(), 0)  # of the newest packet; number 0: there is none yet
        self.counts = PacketCounts()
        self.written_at = time.monotonic()
        self.has_changes = False  # that are in no packet
        self.last_try_failed = False
        self._deadline_s = deadline_s
        self._step = step
        self._gate = threading.Lock()  # held by a packet, a dump or a load
        self._origin: tuple[str, ...] = ()  # of the rows at the beginning: see Base
        self._restart: Base | None = None  # to be written before the next packet: changes follow it already
        self._lost: str | None = None  # why the changes do not follow the last packet
        self._checkpoint: CheckpointReference | None = None
        self._needs_checkpoint_at: int | None = None  # the position that followers need, or a later one
        self._changed_after = time.time()

    def connect(self, peers: Sequence[Peer], settings: IncrementalSettings) -> None:
        with self:  # a dump that has begun must not see the settings without the peers
            self.peers, self.log, self.settings = peers, PacketLog(settings.directory), settings

    def current_counts(self) -> PacketCounts:
        lag_s = time.time() - self._changed_after if self.has_changes else 0.0
        return replace(self.counts, number=self.position.number, lag_s=lag_s)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether followers can only begin with a checkpoint that is still to be written, or would have to
        read more packets than are kept."""
        assert self.settings is not None, "connected"
        begin = 0 if self._checkpoint is None else self._checkpoint.number
        is_long = self.position.number - begin >= self.settings.keep_packets
        return is_long or self._needs_checkpoint_at is not None

    # ---- around dumps and loads

    def try_pause(self) -> bool:
        """False: a dump or a load is under way."""
        return self._gate.acquire(blocking=False)

    def pause(self) -> Position | None:
        # A packet takes a fraction of a second. One that hangs must not hold a dump up for ever.
        if not self._gate.acquire(timeout=self._deadline_s):
            raise DeadlineExceededError(
                f"a packet of changes was not written within {self._deadline_s:g} s (PERSIA_DEADLINE_SEC)"
            )
        if self.settings is None:
            return None
        try:
            if self._restart is not None:  # a checkpoint that is dumped now is newer than the restart
                self._write_restart(self._restart)
        except PersiaError as failure:  # then followers cannot begin with this dump
            get_default_logger().warning("a restart of the packets was not written: %s", failure)
        except BaseException:
            self.resume()
            raise
        return self.position

    def resume(self) -> None:
        self._gate.release()

    def __enter__(self) -> None:
        self.pause()

    def __exit__(self, *_: object) -> None:
        self.resume()

    def dumped(self, directory: Location, section: EmbeddingSection, *, has_dense: bool) -> None:
        if not has_dense:  # a served model cannot begin with rows alone
            return
        if section.packets is None or section.packets.stream != self.position.stream:
            return
        number = section.packets.number
        self._checkpoint = CheckpointReference(url=str(directory), dump_id=section.dump_id, number=number)
        if self._needs_checkpoint_at is not None and number >= self._needs_checkpoint_at:
            self._needs_checkpoint_at = None
        # On a thread of its own: this is called while training may wait, and removing files takes long on a
        # storage service.
        threading.Thread(target=self._remove_old, args=(number,), name="persia-tidy", daemon=True).start()

    def loaded(self, section: EmbeddingSection, *, may_have_changed: bool) -> None:
        if self.position.number == 0:
            stream = () if section.packets is None else (section.packets.stream,)
            self._origin = (section.dump_id, *stream)
        if self.settings is None:
            return
        try:
            self._begin_anew()
        except PersiaError as failure:  # followers will need a checkpoint that is still to be written
            get_default_logger().warning("packets do not follow the checkpoint that was loaded: %s", failure)
            return
        if may_have_changed:  # changes between the load and now were not tracked
            self._restart = Base(
                kind=BaseKind.POSITION, reason="a checkpoint was loaded while training went on"
            )
        else:
            self._restart = Base(
                kind=BaseKind.CHECKPOINT, reason="a checkpoint was loaded", dump_id=section.dump_id
            )
        self._needs_checkpoint_at = None

    # ---- packets, while paused

    def ask(self) -> list[ChangeStatus]:
        """Asks every server how much has changed."""
        # Before the question: a change made during it must not be older than `changed_after` of its packet.
        asked_at = time.time()
        statuses = ask_changes(self.peers, min(self._deadline_s, _STATUS_DEADLINE_S))
        self.has_changes = any(status.num_rows > 0 for status in statuses)
        if not self.has_changes:
            self._changed_after = asked_at
        return statuses

    def follow(self, statuses: Sequence[ChangeStatus]) -> None:
        """Makes the changes of all servers follow this stream's last packet, by a restart if needed."""
        stream, log = self.position.stream, self._require_log()
        if self.last_try_failed and log.exists(self.position.next):
            # The storage has it in spite of the error, and servers kept the changes in it as unwritten.
            self.position, self._lost = self.position.next, f"packet {self.position.next} had failed"
        self.last_try_failed = False
        is_first = self.position.number == 0 and self._restart is None
        if is_first and all(status.is_from_start or status.stream == stream for status in statuses):
            begin_stream(self.peers, stream, self._deadline_s, anew=False)
            self._restart = Base(kind=BaseKind.NOTHING, reason="training begins without rows")
        elif is_first or self._lost is not None or any(status.stream != stream for status in statuses):
            reason = self._lost or ("there were rows before" if is_first else "a server has lost changes")
            if is_first and not self._origin:  # servers that outlived their trainer
                self._origin = tuple({status.stream for status in statuses if status.stream is not None})
            self._begin_anew()
            self._restart = Base(kind=BaseKind.POSITION, reason=reason)
        # Before any packet with rows that follow it, and again after a failure to write it.
        if self._restart is not None:
            self._write_restart(self._restart)

    def write(self, dense: DenseState | None) -> None:
        """Writes what has changed, and `dense` with it, as the next packet."""
        position, began_at = self.position.next, time.time()
        # A folder of its own for each attempt: files of a failed one may still appear on a storage service.
        operation = PacketOperation(
            position.make_folder(),
            self.peers,
            self._deadline_s,
            log=self._require_log(),
            position=position,
            changed_after=self._changed_after,
        )
        packet = operation.run(step=self._step(), dense=dense, checkpoint=self._checkpoint)
        self.position, self._changed_after = position, began_at
        if packet.is_from_nothing and not operation.is_committed:
            # That server would send its changes with the clear once more, the others theirs without.
            self._lost = "a server may not have acknowledged the clear of its rows"
        self.written_at, self.has_changes = time.monotonic(), False
        self.counts.packets += 1
        self.counts.rows += packet.num_rows
        self.counts.bytes += packet.num_bytes

    def _begin_anew(self) -> None:
        """Forgets all changes so far: those from now on follow a checkpoint that is begun later."""
        # Set until all servers have answered: if one does not, the next packet must try this again.
        self._lost = self._lost or "changes were begun anew"
        begin_stream(self.peers, self.position.stream, self._deadline_s, anew=True)
        self._lost, self._changed_after = None, time.time()

    def _write_restart(self, base: Base) -> None:
        position = self.position.next
        if position.number > 1:  # every stream begins with a restart
            get_default_logger().warning("followers need a new checkpoint: %s", base.reason)
        elif base.kind is not BaseKind.NOTHING:
            base = replace(base, origin=self._origin)
        packet = Packet(
            position=position,
            changed_after=self._changed_after,
            cut_at=time.time(),
            step=self._step(),
            base=base,
            checkpoint=self._checkpoint,
        )
        self._require_log().add(packet)
        self.position, self._restart = position, None
        self._needs_checkpoint_at = position.number if base.kind is BaseKind.POSITION else None
        self.counts.restarts += 1

    def _remove_old(self, number: int) -> None:
        """Packets up to `number`, which a checkpoint replaces, but for the last `keep_packets`."""
        assert self.settings is not None, "there is a checkpoint"
        log = PacketLog(self._require_log().location)  # a PacketLog is for one thread
        try:
            # Some stay: a follower that is reading them would otherwise begin from the checkpoint each time.
            last = min(number, self.position.number - self.settings.keep_packets)
            log.remove_until(Position(self.position.stream, last))
        except PersiaError as failure:
            get_default_logger().warning("old packets stay behind: %s", failure)

    def _require_log(self) -> PacketLog:
        if self.log is None:
            raise FailedPreconditionError("this job writes no packets")
        return self.log
