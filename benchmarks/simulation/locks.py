"""What stands for the modules threading and time in the product's modules."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.simulation.kernel import NEVER, SECOND, Kernel, Thread

_READ_NS = 50  # that reading a clock takes


class Lock:
    """threading.Lock and threading.RLock."""

    is_reentrant = False

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._count = 0
        self._waiting: list[Thread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = Kernel.current
        thread = kernel.thread
        if not self._count:
            self._owner, self._count = thread, 1
            return True
        if self.is_reentrant and thread is not None and self._owner is thread:
            self._count += 1
            return True
        until = kernel.after(None if timeout < 0 else timeout)
        while self._count:
            if not blocking or kernel.now >= until:
                return False
            self._waiting.append(kernel.this_thread())
            kernel.this_thread().wait(until)
        self._owner, self._count = thread, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._owner = None
            if not self._waiting:
                return
            for thread in self._waiting:
                thread.wake()
            self._waiting = []

    def locked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_exc_info: object) -> None:
        self.release()


class RLock(Lock):
    is_reentrant = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Thread] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_exc_info: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        kernel = Kernel.current
        thread = kernel.this_thread()
        until = kernel.after(timeout)
        self._waiting.append(thread)
        self._lock.release()
        try:
            return thread.wait(until)
        finally:
            if thread in self._waiting:
                self._waiting.remove(thread)
            if not thread.process.is_dead:
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        kernel = Kernel.current
        until = kernel.after(timeout)
        while not (result := predicate()):
            if kernel.now >= until:
                return result
            self.wait(None if until == NEVER else (until - kernel.now) / SECOND)
        return result

    def notify(self, n: int = 1) -> None:
        for thread in self._waiting[:n]:
            thread.wake()
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            thread.wake()
        self._waiting.clear()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        kernel = Kernel.current
        thread, until = kernel.this_thread(), kernel.after(timeout)
        while not self._is_set and kernel.now < until:
            self._waiting.append(thread)
            thread.wait(until)
            if thread in self._waiting:
                self._waiting.remove(thread)
        return self._is_set


class Threading:
    """In place of the module threading."""

    Lock, RLock, Condition, Event, Thread = Lock, RLock, Condition, Event, Thread


class Clock:
    """In place of the module time."""

    @staticmethod
    def monotonic() -> float:
        kernel = Kernel.current
        if kernel.thread is not None:
            kernel.thread.check()
        # Takes time, as in the native half: a loop that waits for the clock ends.
        kernel.clock.value = now = kernel.clock.value + _READ_NS
        return now / SECOND

    @staticmethod
    def time() -> float:
        return 1_700_000_000 + Kernel.current.now / SECOND

    @staticmethod
    def monotonic_ns() -> int:
        return Kernel.current.now

    @staticmethod
    def sleep(seconds: float) -> None:
        Kernel.current.sleep(seconds)
