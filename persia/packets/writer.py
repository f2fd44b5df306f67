"""Writes packets of changes while a job trains: when enough has changed, or time has passed, and at the end.

A thread of its own, in the process that also coordinates checkpoints; training only copies its dense model
when asked to. What goes wrong is logged and counted and tried again (stream.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from persia.checkpoint.checkpoints import Checkpoints, DumpRequest
from persia.checkpoint.peers import Peer
from persia.errors import PersiaError
from persia.logger import get_default_logger
from persia.packets.operation import ChangeStatus, DenseState, ask_changes
from persia.packets.stream import PacketStream
from persia.storage.signature import Signature
from persia.waiting import Attempts

DENSE_FILE = "dense.pt"

_LONGEST_TICK_S = 0.1
_CONNECT_S = 5.0  # at the end, for a job so short that the servers have not answered yet
_LONGEST_PAUSE_S = 30.0  # between tries after failures
_SHARE_OF_CHECKPOINTS = 0.1  # of the time, at most, that the writer's own checkpoints take
_KEEP_CHECKPOINTS = 2
_SETTLE_S = 1.0  # after the last change of other ranks, at the end
_LONGEST_SETTLING_S = 10.0


class PacketWriter:
    """The packets of one job. `stream` is the hook of the job's `Checkpoints`. Thread-safe."""

    def __init__(
        self,
        find_peers: Callable[[], Sequence[Peer]],
        *,
        deadline_s: float,
        step: Callable[[], int],
        num_trainers: int = 1,
    ) -> None:
        """`find_peers` returns all servers, by index; `step` that of the training loop, on another thread."""
        self.stream = PacketStream(deadline_s=deadline_s, step=step)
        self._find_peers = find_peers
        self._deadline_s = deadline_s
        self._step = step
        self._num_trainers = num_trainers
        # Beside the job's, as a `Checkpoints` is for one thread. The hook keeps the two from overlapping.
        self._checkpoints = Checkpoints(find_peers, deadline_s=deadline_s)
        self._checkpoints.hook = self.stream
        self._next_checkpoint = float("-inf")
        self._offered: tuple[int, Callable[[], bytes], Signature | None] | None = None
        self._dense: DenseState | None = None  # the newest in a packet
        self._dense_at = float("-inf")
        self.wants_dense = False  # read by the training thread, without a lock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persia-packets", daemon=True)

    def start(self) -> None:
        """Asks the servers whether packets are wanted, and writes them if so."""
        self._thread.start()

    def offer_dense(self, step: int, encode: Callable[[], bytes], signature: Signature | None = None) -> None:
        """When `wants_dense`: the dense model as it is now; `encode` makes a file of it, on any thread."""
        self._offered, self.wants_dense = (step, encode, signature), False

    def close(self, timeout_s: float | None) -> None:
        """Writes the last packet, and a checkpoint when followers need one. Without `timeout_s` it waits as
        long as there is progress within the job's deadline."""
        self._stop.set()
        if self._thread.ident is None:  # it was never started
            return
        began_at = time.monotonic()
        self._thread.join(_CONNECT_S if timeout_s is None else min(timeout_s, _CONNECT_S))
        if self.stream.settings is None:  # whether packets are wanted is not known
            return
        if timeout_s is None:
            self._join_while_it_progresses()
        else:
            self._thread.join(max(0.0, began_at + timeout_s - time.monotonic()))
        if self._thread.is_alive():
            has_changes = self.stream.has_changes
            lost = "the last changes are in no packet" if has_changes else "no checkpoint is written"
            get_default_logger().warning("%s: there was no time for it", lost)

    def _join_while_it_progresses(self) -> None:
        # Operations find servers that hang. Nothing else finds storage that hangs calls of this process.
        began_at = time.monotonic()
        attempts = Attempts(self._deadline_s, pause_s=1.0)
        for pause_s in attempts:
            self._thread.join(pause_s)
            if not self._thread.is_alive():
                return
            attempts.progressed(max(began_at, self.stream.written_at, self._checkpoints.progress_at))

    def _run(self) -> None:
        while self.stream.settings is None:
            try:
                if not self._connect():
                    return
            except PersiaError as failure:
                get_default_logger().debug("packets of changes: %s", failure)
                if self._stop.wait(1.0):
                    return
        # Four questions an interval: a packet is late by a quarter of it at most.
        tick_s, pause_s = min(_LONGEST_TICK_S, self.stream.settings.interval_s / 4), 0.0
        # After failures the pauses grow: each try asks all servers and may write files in vain.
        while not self._stop.wait(max(tick_s, pause_s)):
            pause_s = 0.0 if self._survives(self._tick) else min(max(1.0, 2 * pause_s), _LONGEST_PAUSE_S)
        self._survives(self._finish)
        self._checkpoints.close(finish=True)

    def _survives(self, action: Callable[[], None]) -> bool:
        try:
            action()
            return True
        except PersiaError as failure:
            get_default_logger().error("no packet of changes was written: %s", failure)
        except Exception:
            get_default_logger().exception("no packet of changes was written")
        # The storage may have the packet in spite of the error: `follow` looks for it at the next try.
        self.stream.last_try_failed = True
        self.stream.counts.failures += 1
        return False

    def _connect(self) -> bool:
        """Finds out whether this job writes packets."""
        peers = self._find_peers()
        settings = {status.settings for status in ask_changes(peers, self._deadline_s)}
        # A server that writes elsewhere would leave holes in every packet.
        if len(settings) > 1:
            get_default_logger().error("the servers disagree about incremental updates: start them alike")
            return False
        found = settings.pop()
        if found is None:
            return False
        self.stream.connect(peers, found)
        get_default_logger().info("packets of changes go to %s", found.directory)
        return True

    def _tick(self) -> None:
        if not self.stream.try_pause():
            return  # a dump or a load is under way
        try:
            statuses = self.stream.ask()
            if self._is_due(statuses):
                self._write(statuses)
        finally:
            self.stream.resume()
        self._checkpoint_if_needed()

    def _finish(self) -> None:
        """Writes packets until nothing changes any more: other ranks end at other times."""
        last_change = time.monotonic()
        for _ in Attempts(_LONGEST_SETTLING_S, pause_s=_LONGEST_TICK_S):
            with self.stream:
                statuses = self.stream.ask()
                if self.stream.has_changes or (self._offered is not None and self.stream.position.number > 0):
                    last_change = time.monotonic()
                    self._write(statuses)
            if self._num_trainers == 1 or time.monotonic() - last_change > _SETTLE_S:
                break
        self._checkpoint_if_needed()

    def _is_due(self, statuses: Sequence[ChangeStatus]) -> bool:
        settings = self.stream.settings
        assert settings is not None, "connected"
        num_rows = max(status.num_rows for status in statuses)
        if time.monotonic() - self._dense_at >= settings.dense_interval_s and self._offered is None:
            self.wants_dense = True
        if num_rows >= settings.buffer_size:
            return True
        return num_rows > 0 and time.monotonic() - self.stream.written_at >= settings.interval_s

    def _write(self, statuses: Sequence[ChangeStatus]) -> None:
        self.stream.follow(statuses)
        offered, self._offered = self._offered, None
        dense = None
        if offered is not None:
            step, encode, signature = offered
            dense = DenseState(files={DENSE_FILE: encode()}, step=step, signature=signature)
        self.stream.write(dense)
        if dense is not None:
            self._dense, self._dense_at = dense, self.stream.written_at

    def _checkpoint_if_needed(self) -> None:
        """Writes a checkpoint that followers need."""
        # `_next_checkpoint`: training that outruns `keep_packets` would need one checkpoint after another.
        if not self.stream.needs_checkpoint or time.monotonic() < self._next_checkpoint:
            return
        if self._dense is None and not self._stop.is_set():
            # Followers need rows and dense model together: wait until the training offers one.
            self.wants_dense = self._offered is None
            return
        assert self.stream.log is not None, "connected"
        began_at = time.monotonic()
        try:
            self._checkpoints.dump(
                DumpRequest(
                    self.stream.log.checkpoints,
                    dense={} if self._dense is None else self._dense.files,
                    signature=None if self._dense is None else self._dense.signature,
                    step=self._step(),
                    keep_last=_KEEP_CHECKPOINTS,
                    keep_small_rows=True,  # to remove them at any time would change the training
                    blocking=False,  # without a bar
                )
            )
            self._checkpoints.wait_for_dump()
        finally:
            # Also after a failure: a storage that refuses is not asked at every tick.
            took_s = time.monotonic() - began_at
            self._next_checkpoint = time.monotonic() + took_s / _SHARE_OF_CHECKPOINTS
        self.stream.counts.checkpoints += 1
