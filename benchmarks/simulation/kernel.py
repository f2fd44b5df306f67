"""A simulated machine room for the Python half of the product: threads, clocks and processes of one seed.

A thread of the simulation is a greenlet, which runs only while the kernel waits for it, so one thing happens
at a time, in an order that follows from the seed. The native half (native/simulation) has the clock; the
kernel lets it run until the next event of this half. `Threading` and `Clock` of locks.py replace the modules
of those names in the product's modules.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from typing import Any, ClassVar

from greenlet import getcurrent, greenlet

from benchmarks.simulation.library import Library, error_of
from persia.errors import InternalError, PersiaError

SECOND = 1_000_000_000
_MAX_STEPS = 2_000_000  # of each half of a seed, which needs some thousands
NEVER = 1 << 62


class Killed(BaseException):
    """Ends the threads of a process that was killed."""


class Process:
    """A process of the simulation, on a host: with its native half of the same number."""

    def __init__(self, kernel: Kernel, name: str, host: int) -> None:
        self.kernel, self.name, self.host = kernel, name, host
        self.number = kernel.library.process(host)
        self.is_dead = self.is_frozen = False
        self.threads: dict[Thread, None] = {}  # in an order that follows from the seed
        self.inbox: list[Callable[[], None]] = []  # what has happened while it is frozen
        self.on_killed: list[Callable[[], None]] = []
        kernel.processes.append(self)

    @property
    def address(self) -> str:
        return f"host{self.host}"

    def start(self, main: Callable[[], object]) -> None:
        """Runs `main` as its main thread; the process ends with it. An error of a bug fails the seed."""

        def run() -> None:
            try:
                main()
            except PersiaError as error:
                if isinstance(error, InternalError):
                    raise
                self.kernel.log("%s ends: %r", self.name, error)
            self.kill()

        self.kernel.spawn(self, run)

    def take(self, event: Callable[[], None]) -> None:
        """Happens to it now: not once it is dead, and later while it is frozen."""
        if self.is_frozen and not self.is_dead:
            self.inbox.append(event)
        elif not self.is_dead:
            event()

    def kill(self) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        self.inbox.clear()
        self.kernel.library.kill(self.number)
        for callback in self.on_killed:
            callback()
        # At once, wherever it is: also one that was about to run, whose event is dropped.
        for thread in tuple(self.threads):
            self.kernel.soon(thread.unwind)

    def freeze(self, is_frozen: bool) -> None:
        if self.is_dead:
            return
        self.is_frozen = is_frozen
        self.kernel.library.freeze(self.number, is_frozen)
        if not is_frozen:
            for event in self.inbox:
                self.kernel.soon(event, self)
            self.inbox = []


_idle: list[greenlet] = []  # each waits for the next thread: to make one costs more than most threads


def _run_threads(thread: Thread) -> None:
    while True:
        thread.run()
        _idle.append(getcurrent())
        thread = thread.kernel.hub.switch()


class Thread:
    """A thread of the simulation, with the part of the interface of threading.Thread that is used."""

    def __init__(
        self,
        *,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = True,
        process: Process | None = None,
    ) -> None:
        self.kernel = Kernel.current
        self.process = process or self.kernel.process
        self._target, self._args = target, args
        self._greenlet: greenlet | None = None  # once it has begun
        self._num_waits = 0
        self._is_waiting = False
        self._timed_out = False
        self._ended: list[Thread] = []
        self._has_ended = False

    def start(self) -> None:
        self.process.threads[self] = None
        self.kernel.soon(self._begin, self.process)

    def _begin(self) -> None:
        kernel = self.kernel
        self._greenlet = _idle.pop() if _idle else greenlet(_run_threads, parent=kernel.hub)
        kernel.thread = self
        self._greenlet.switch(self)
        kernel.thread = None

    def run(self) -> None:
        try:
            self._target(*self._args)
        except Killed:
            pass
        except BaseException as error:
            self.kernel.fail(f"a thread of {self.process.name} has ended with {error!r}", error)
        self._has_ended, self._greenlet = True, None
        self.process.threads.pop(self, None)
        for waiting in self._ended:
            waiting.wake()

    def _resume(self) -> None:
        kernel = self.kernel
        assert self._greenlet is not None
        kernel.thread = self
        self._greenlet.switch()
        kernel.thread = None

    def wait(self, until: int = NEVER) -> bool:
        """Of this thread: until `wake`, or the time. False: it was the time."""
        process, kernel = self.process, self.kernel
        if process.is_dead:
            raise Killed
        self._num_waits = number = self._num_waits + 1
        self._is_waiting, self._timed_out = True, False
        if until < NEVER:
            kernel.at(until, partial(self._time_out, number), process)
        kernel.hub.switch()
        if process.is_dead:
            raise Killed
        return not self._timed_out

    def check(self) -> None:
        if self.process.is_dead:
            raise Killed

    def _time_out(self, number: int) -> None:
        if self._is_waiting and self._num_waits == number:
            self._timed_out, self._is_waiting = True, False
            self._resume()

    def wake(self) -> None:
        if not self._is_waiting or self.process.is_dead:
            return
        self._is_waiting = False
        self.kernel.soon(self._resume, self.process)

    def unwind(self) -> None:
        """Ends it now, if it has begun and not ended, and its process is dead."""
        if self._greenlet is not None:
            self._is_waiting = False
            self._resume()

    def join(self, timeout: float | None = None) -> None:
        thread = self.kernel.this_thread()
        until = self.kernel.after(timeout)
        while not self._has_ended and self.kernel.now < until:
            self._ended.append(thread)
            thread.wait(until)

    def is_alive(self) -> bool:
        return not self._has_ended


class Kernel:
    """The events of one seed. One at a time in a real process."""

    current: ClassVar[Kernel]

    def __init__(self, library: Library, seed: int, *, trace: bool = False) -> None:
        Kernel.current = self
        self.library = library
        self.random = random.Random(seed)
        self.hub = getcurrent()
        library.reset(seed)
        self.clock = library.clock
        self._events: list[tuple[int, int, Callable[[], None], Process | None]] = []
        self._num_events = self._num_steps = 0
        self._calls: dict[int, Thread] = {}
        self._results: dict[int, tuple[int, int, str]] = {}
        self.thread: Thread | None = None
        self.failure: str = ""
        self.cuts: set[tuple[int, int]] = set()
        self.trace = trace
        self.spikes = 0.0  # share of the messages of the broker that take long
        self.processes: list[Process] = []
        self.begin = self.now
        self.outside = Process(self, "the simulation", 0)

    @property
    def now(self) -> int:
        return self.clock.value

    @property
    def process(self) -> Process:
        return self.outside if self.thread is None else self.thread.process

    @property
    def elapsed_s(self) -> float:
        return (self.now - self.begin) / SECOND

    def cut(self, host: int, other: int, is_cut: bool) -> None:
        for link in ((host, other), (other, host)):
            (self.cuts.add if is_cut else self.cuts.discard)(link)
        self.library.cut(host, other, is_cut)

    def is_cut(self, host: int, other: int) -> bool:
        return (host, other) in self.cuts

    def log(self, message: str, *arguments: object) -> None:
        if self.trace:
            print(f"{self.elapsed_s:10.4f} {self.process.name}: {message % arguments}", flush=True)

    def fail(self, failure: str, error: BaseException | None = None) -> None:
        if not self.failure:
            self.failure = failure
            self.log("FAILED: %s", failure)
            if self.trace and error is not None:
                traceback.print_exception(error)

    def this_thread(self) -> Thread:
        assert self.thread is not None, "the kernel itself does not wait"
        return self.thread

    def after(self, seconds: float | None) -> int:
        if seconds is None:
            return NEVER
        return self.clock.value + (int(seconds * SECOND) if seconds > 0 else 0)

    def at(self, when: int, event: Callable[[], None], process: Process | None = None) -> None:
        """As `process`: not once it is dead, and later while it is frozen."""
        self._num_events = number = self._num_events + 1
        now = self.clock.value
        heappush(self._events, (when if when > now else now, number, event, process))

    def soon(self, event: Callable[[], None], process: Process | None = None) -> None:
        """`at` now."""
        self._num_events = number = self._num_events + 1
        heappush(self._events, (self.clock.value, number, event, process))

    def later(self, seconds: float, event: Callable[[], None], process: Process | None = None) -> None:
        self.at(self.after(seconds), event, process)

    def spawn(self, process: Process, target: Callable[[], object]) -> None:
        Thread(target=target, process=process).start()

    def sleep(self, seconds: float) -> None:
        self.this_thread().wait(self.after(seconds))

    def call(self, begin: Callable[[int], int]) -> int:
        """Waits for a call of the native half; returns its number. Raises its error."""
        thread = self.this_thread()
        thread.check()
        number = begin(thread.process.number)
        self._calls[number] = thread
        while number not in self._results:
            thread.wait()
        code, result, text = self._results.pop(number)
        if code != 0:
            raise error_of(code)(text)
        return result

    def run(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Until `is_done`, which is asked after events of processes. False: the time is over, or a check has
        failed.
        """
        limit = self.begin + int(limit_s * SECOND)
        events, clock, next_native = self._events, self.clock, self.library.next
        process: Process | None = self.outside
        while not self.failure and clock.value <= limit:
            if process is not None and is_done():
                return True
            self._num_steps += 1
            if self._num_steps > _MAX_STEPS:
                return self._never_ends()
            while next_native.value <= (when := events[0][0] if events else limit + 1):
                if (num_ended := self.library.run(when, _MAX_STEPS)) == 0:
                    break
                if num_ended < 0:
                    return self._never_ends()
                self._take_results(num_ended)
            when, _, event, process = heappop(events)
            if when > clock.value:
                clock.value = when
            if process is None or not (process.is_dead or process.is_frozen):
                event()
            else:
                process.take(event)
        return False

    def _never_ends(self) -> bool:
        self.fail(f"no end within {_MAX_STEPS} steps")
        return False

    def _take_results(self, num_ended: int) -> None:
        for _ in range(num_ended):
            number, result = self.library.take_ended()
            thread = self._calls.pop(number, None)
            if thread is not None and not thread.process.is_dead:
                self._results[number] = result
                thread.wake()

    def close(self) -> None:
        """Ends all threads."""
        for process in self.processes:
            process.on_killed.clear()
            threads = tuple(process.threads)
            process.kill()
            for thread in threads:
                thread.unwind()
        self._events.clear()


@contextmanager
def patched(modules: dict[Any, dict[str, object]]) -> Iterator[None]:
    """The names of these modules and classes stand for other things in the block."""
    before = {module: {name: vars(module)[name] for name in names} for module, names in modules.items()}
    try:
        for module, names in modules.items():
            for name, value in names.items():
                setattr(module, name, value)
        yield
    finally:
        for module, names in before.items():
            for name, value in names.items():
                setattr(module, name, value)
