"""Starts processes, passes on their output line by line, and ends them all together.

A `Supervisor` does so on this machine, for `persia-launcher local` and `LocalCluster`. Every process leads a
group of its own, so that ending it ends what it has started; a watchdog ends the groups when this process is
killed. `persia-launcher ray` has a `ProcessGroup` on the nodes of a cluster.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from persia.errors import FailedPreconditionError

OutputSink = Callable[[str, str], None]  # (process name, line without its end)

# Enough for a traceback; a process that runs for days must not fill the memory of its supervisor.
_KEPT_LINES = 2000
_MAX_LINE_BYTES = 64 << 10
# A grandchild may keep the pipe open after the process has ended: how long to wait for another line, and how
# often.
_OUTPUT_END_S = 1.0
_OUTPUT_ENDS = 5
_GRACE_S = 5.0
_KILL_S = 60.0  # the kernel frees the memory of a large server
# Not a session: Linux shares processors between sessions first, and within them by niceness (autogroup), so
# that the dumping threads of a server would not give way to the other processes of the job.
_GROUP_OF_ITS_OWN: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """What to start. `env` is the whole environment."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    stop_stage: int = 0  # those of a stage are stopped once those of lower ones have ended


class SupervisedProcess(ABC):
    """A process that was started, here or elsewhere: its output so far and its end."""

    def __init__(self, spec: ProcessSpec, sink: OutputSink, num_restarts: int = 0) -> None:
        """`num_restarts`: earlier starts of this name."""
        self.spec = spec
        self.num_restarts = num_restarts
        self._sink = sink
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._exit_code: int | None = None
        self._ended = threading.Event()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._exit_code if self._ended.is_set() else None

    @property
    def output(self) -> str:
        """The last 2,000 lines that it has written."""
        return "\n".join(tuple(self._lines))

    def wait(self, timeout_s: float) -> int | None:
        """Waits for the end, its output read; returns the exit code, or None when it still runs."""
        return self._exit_code if self._ended.wait(timeout_s) else None

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Sends `number` to the process and to what it has started. Does nothing after the end."""

    def _add_line(self, line: str) -> None:
        self._lines.append(line)
        self._sink(self.name, line)


class ManagedProcess(SupervisedProcess):
    """A process of a `Supervisor`, on this machine."""

    def __init__(
        self,
        spec: ProcessSpec,
        sink: OutputSink,
        on_exit: Callable[[ManagedProcess], None],
        num_restarts: int = 0,
        watchdog: IO[bytes] | None = None,
    ) -> None:
        """`watchdog`: its standard input; None: there is none."""
        super().__init__(spec, sink, num_restarts)
        self._on_exit = on_exit
        self._watchdog = watchdog
        self._lock = threading.Lock()
        self._is_reaped = False  # its pid may then belong to another process; guarded by _lock
        program = _program_of(spec)
        self._popen = subprocess.Popen(
            [*(() if watchdog is None else (*_script("named_process.py"), program)), *spec.command],
            # For its metrics and status: a process does not know how often it was started.
            env={**spec.env, "PERSIA_RESTARTS": str(num_restarts)},
            # A process must not take input from the terminal of the launcher.
            stdin=subprocess.DEVNULL if watchdog is None else watchdog,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **_GROUP_OF_ITS_OWN,
        )
        self._num_lines = 0
        self._reader = threading.Thread(target=self._read, name=f"persia-output-{spec.name}", daemon=True)
        self._waiter = threading.Thread(target=self._await_end, name=f"persia-wait-{spec.name}", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def pid(self) -> int:
        """Also the number of its process group."""
        return self._popen.pid

    def send_signal(self, number: signal.Signals) -> None:
        with self._lock:
            if not self._is_reaped:
                self._signal_group(number)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _tell_watchdog(self) -> None:
        """That the group has ended. Before another process may get its number and name it."""
        if self._watchdog is None:
            return
        # The pipe breaks only if the watchdog is killed, which must not harm the processes. ValueError: the
        # supervisor has closed it.
        with contextlib.suppress(OSError, ValueError):
            self._watchdog.write(b"-%d\n" % self.pid)
            self._watchdog.flush()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as stdout:
            # Bounded: a process that writes no newline must not fill our memory.
            while chunk := stdout.readline(_MAX_LINE_BYTES):
                self._add_line(chunk.decode(errors="replace").rstrip("\r\n"))
                self._num_lines += 1

    def _await_end(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            # What it has started and not ended is of no more use. Not reaped yet, it still holds the group's
            # number.
            self._signal_group(signal.SIGKILL)
            self._tell_watchdog()
            self._exit_code = self._popen.wait()
            self._is_reaped = True
        self._await_output()
        self._on_exit(self)
        self._ended.set()

    def _await_output(self) -> None:
        for _ in range(_OUTPUT_ENDS):
            known = self._num_lines
            self._reader.join(_OUTPUT_END_S)
            if known == self._num_lines or not self._reader.is_alive():
                return


_Process = TypeVar("_Process", bound=SupervisedProcess)
_Group = TypeVar("_Group", bound="ProcessGroup[Any]")


class ProcessGroup(ABC, Generic[_Process]):
    """Owns a set of processes, each with its own name. Use as a context manager: leaving it ends them all."""

    def __init__(self, sink: OutputSink | None = None) -> None:
        """`sink(name, line)` is called for every line of output, on several threads."""
        self._sink: OutputSink = sink or (lambda _name, _line: None)
        self._processes: dict[str, _Process] = {}
        self._ended: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of starts

    def __enter__(self: _Group) -> _Group:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def processes(self) -> list[_Process]:
        """All that were started, in that order; of a name started again the latest."""
        return list(self._processes.values())

    def start(self, spec: ProcessSpec, num_restarts: int | None = None) -> _Process:
        """Starts `spec`; its name must not be that of a running process.

        `num_restarts`: its earlier starts, if others have counted them.
        """
        known = self._processes.get(spec.name)
        if known is not None and known.exit_code is None:
            raise FailedPreconditionError(f"process {spec.name} is running already")
        if num_restarts is None:
            num_restarts = 0 if known is None else known.num_restarts + 1
        with self._lock:
            process = self._make(spec, num_restarts)
            self._processes[spec.name] = process
        return process

    @abstractmethod
    def _make(self, spec: ProcessSpec, num_restarts: int) -> _Process:
        """Starts it. It adds itself to `_ended` when it ends. The caller holds `_lock`."""

    def next_ended(self, timeout_s: float) -> _Process | None:
        """The next process that has ended, in the order of their ends; None when none does in `timeout_s`."""
        try:
            process = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return None
        process.wait(_GRACE_S)  # it says so a moment before
        return process

    def kill(self, names: Collection[str]) -> None:
        """Kills those of `names` that run, together, and waits for their ends."""
        killed = [process for process in self.processes if process.name in names]
        for process in killed:
            process.send_signal(signal.SIGKILL)
        for process in killed:
            process.wait(_KILL_S)

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Terminates all processes, one `stop_stage` after the other, those of a stage together. Idempotent.

        What is left of a stage after `grace_s` is killed before the next one begins.
        """
        # Workers return gradients to servers and both use NATS, so the stages end in this order.
        for stage in sorted({process.spec.stop_stage for process in self.processes}):
            terminate([p for p in self.processes if p.spec.stop_stage == stage], grace_s)


class Supervisor(ProcessGroup[ManagedProcess]):
    """Processes of this machine."""

    def __init__(self, sink: OutputSink | None = None, *, detach_watchdog: bool = False) -> None:
        """`detach_watchdog`: for a process whose children are killed when it ends."""
        super().__init__(sink)
        self._watchdog_options = ("--detach",) if detach_watchdog else ()
        self._watchdog: subprocess.Popen[bytes] | None = None  # guarded by _lock

    def _make(self, spec: ProcessSpec, num_restarts: int) -> ManagedProcess:
        # Under the lock to the end: a `stop` meanwhile would close the pipe that the process begins with.
        if self._watchdog is None:
            # A separate process, because it must outlive a supervisor that is killed.
            self._watchdog = subprocess.Popen(
                (*_script("watchdog.py"), *self._watchdog_options), stdin=subprocess.PIPE
            )
            if self._watchdog_options:
                self._watchdog.wait()  # the watchdog is a child of that process
        return ManagedProcess(spec, self._sink, self._ended.put, num_restarts, self._watchdog.stdin)

    def stop(self, grace_s: float = _GRACE_S) -> None:
        super().stop(grace_s)
        with self._lock:
            watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            with contextlib.suppress(OSError):
                watchdog.communicate()
            watchdog.wait()


def _script(name: str) -> tuple[str, ...]:
    # Isolated and without site-packages: it starts in a few milliseconds.
    return sys.executable, "-I", "-S", str(Path(__file__).with_name(name))


def _program_of(spec: ProcessSpec) -> str:
    """The path of its program. FileNotFoundError, PermissionError: it cannot be started."""
    name, path = spec.command[0], spec.env.get("PATH", os.defpath)
    program = shutil.which(name, path=path)
    if program is None:
        code = errno.ENOENT if shutil.which(name, os.F_OK, path) is None else errno.EACCES
        raise OSError(code, os.strerror(code), name)
    return program


def terminate(processes: Sequence[SupervisedProcess], grace_s: float) -> None:
    """Ends them together. What is left after `grace_s` is killed."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for process in processes:
        if process.wait(max(0.0, deadline - time.monotonic())) is None:
            process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait(_GRACE_S)
