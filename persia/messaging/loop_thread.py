"""An event loop on a thread of its own, for threads that wait for coroutines.

In: coroutines of any thread. Out: their results on that thread, or a typed error. Every wait ends by a
deadline, and a loop that is closed meanwhile ends the wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from persia.errors import DeadlineExceededError, FailedPreconditionError, PersiaError, UnavailableError
from persia.logger import get_default_logger

_T = TypeVar("_T")

# A call ends on the loop by its own time-out; this is the backstop of the thread that waits.
CALL_MARGIN_S = 5.0
_SIGNAL_STEP_S = 0.2
_STOP_S = 5.0
_CANCELLATIONS, _CANCEL_STEP_S = 10, 0.1


class LoopThread:
    """Runs the loop of one session. Used once: `start`, then `call`, then `close`.

    `name` labels the session in messages. `raise_if_refused` raises while no call can succeed.
    """

    def __init__(self, name: str, raise_if_refused: Callable[[], None]) -> None:
        self.loop = asyncio.new_event_loop()
        self._name = name
        self._raise_if_refused = raise_if_refused
        self._thread = threading.Thread(target=self.loop.run_forever, name=f"persia-nats-{name}", daemon=True)
        self._lock = threading.Lock()
        self._state = "new"  # then "open", then "closed"; guarded by _lock

    @property
    def is_open(self) -> bool:
        """Whether calls are taken."""
        return self._state == "open"

    def start(self) -> None:
        """Starts the thread. FailedPreconditionError: it was started before."""
        with self._lock:
            if self._state != "new":
                raise FailedPreconditionError(f"this NATS session is {self._state} already: create a new one")
            self._thread.start()
            self._state = "open"

    def call(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Runs `coroutine` on the loop and waits for it, for `timeout_s` and a margin at most.

        Raises what the coroutine raises, UnavailableError if the loop is closed meanwhile, and
        DeadlineExceededError if the loop is overloaded.
        """
        future = self._submit(coroutine)
        end = time.monotonic() + timeout_s + CALL_MARGIN_S
        try:
            # In steps: a signal that another thread receives, or that arrives just before the main thread
            # begins to wait, does not end that wait, and its handler would not run before the deadline.
            while not wait((future,), _SIGNAL_STEP_S).done and time.monotonic() < end:
                pass
            return future.result(0)
        except PersiaError:  # some are a TimeoutError, too
            raise
        except CancelledError:
            self._raise_if_refused()
            raise UnavailableError(f"the NATS session {self._name} was closed meanwhile") from None
        except FutureTimeoutError:  # the coroutine has a time-out, but the loop does not run it
            future.cancel()
            raise DeadlineExceededError(
                f"the NATS session {self._name} is overloaded: no result in time"
            ) from None
        except BaseException:  # KeyboardInterrupt: the result is not wanted any more
            future.cancel()
            raise

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        try:
            self._raise_if_refused()
            # Under the lock: a call submitted before `close` reaches the loop before the shutdown, which
            # cancels it. Without the lock the caller could wait for a loop that has stopped.
            with self._lock:
                if self._state != "open":
                    state = "not connected" if self._state == "new" else self._state
                    raise FailedPreconditionError(f"the NATS session {self._name} is {state}")
                if threading.current_thread() is self._thread:
                    raise FailedPreconditionError(
                        "a NATS handler on the session's loop would wait for itself"
                    )
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except PersiaError:
            coroutine.close()
            raise

    def close(self, shut_down: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Runs `shut_down()` on the loop, cancels what still runs there, and ends the thread.

        Idempotent. Returns whether this call closed a loop that was open.
        """
        with self._lock:
            was, self._state = self._state, "closed"
        if was == "new":
            self.loop.close()
        if was != "open":
            return False
        asyncio.run_coroutine_threadsafe(self._shut_down(shut_down), self.loop)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            get_default_logger().warning("the NATS session %s did not stop in time, left behind", self._name)
        else:
            self.loop.close()
        return True

    async def _shut_down(self, shut_down: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await shut_down()
            # Threads that still wait get a CancelledError, which `call` reports as a closed session. Again
            # and again: a client that connects anew may lose a cancellation, and begin another connection.
            for _ in range(_CANCELLATIONS):
                others = asyncio.all_tasks() - {asyncio.current_task()}
                if not others:
                    break
                for task in others:
                    task.cancel()
                await asyncio.wait(others, timeout=_CANCEL_STEP_S)
        finally:
            self.loop.stop()
