"""Embedding workers of an inference job: their addresses are known, and any of them answers any lookup."""

from __future__ import annotations

import functools
import itertools
import math
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from persia import env
from persia._native import LookupResult, RemoteClient
from persia.errors import DeadlineExceededError, InvalidArgumentError, PersiaError, UnavailableError
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.queues import Deadline
from persia.pipeline.staleness import ALL_SLOTS
from persia.security import install
from persia.security.secret import INFERENCE
from persia.waiting import Attempts

# For one worker, as long as another is left: a worker that hangs must not use up the deadline of a lookup.
_TRY_S = 1.0
_CHECK_S = 0.05  # a lookup without an answer for so long finds out whether anything listens there
_RETRY_S = 0.1
_NUM_LATENCIES = 256  # that the delay before a second worker is asked is taken from
_MAX_ASKED = 2  # workers that one lookup asks at a time
_LEAST_HEDGE_S = 0.002  # differences below are of this machine's scheduler
_MAX_LOOKUPS = 64  # under way at a time; those that are given up end by their time-out


class InferenceBackend(EmbeddingBackend):
    """Lookups that skip workers that are down; any worker can answer them, as none holds a batch."""

    def __init__(self, addresses: Sequence[str]) -> None:
        deadline_s = env.get_deadline_s()
        super().__init__(_client(addresses), deadline_s=deadline_s)
        self._rows = RemoteRows(addresses, deadline_s=deadline_s, is_patient=True)

    def lookup_direct(
        self,
        id_features: bytes | memoryview,
        *,
        requires_grad: bool,
        slots: int = ALL_SLOTS,
        as_rows: bool = False,
    ) -> LookupResult:
        return self._rows.lookup(bytes(id_features))


class RemoteRows:
    """The rows of parameter servers, behind embedding workers that take turns.

    A worker that refuses connections or does not answer is left out, and its lookup goes to the next one. A
    thread asks it again until it answers: lookups never try whether a worker is back. A lookup that takes
    longer than most is hedged: the next worker is asked as well, and the first answer wins.
    """

    num_missing: int | None = None

    def __init__(
        self, addresses: Sequence[str], *, deadline_s: float | None = None, is_patient: bool = False
    ) -> None:
        """`addresses`: "host:port" of each embedding worker; `deadline_s` of a lookup, all tries together.

        `is_patient`: a lookup waits until its deadline for a worker; otherwise it fails as soon as all are
        known to be down.
        """
        if isinstance(addresses, str) or not addresses:
            raise InvalidArgumentError(
                f"addresses is {addresses!r}: name at least one embedding worker, ['host:port']"
            )
        self._addresses = list(addresses)
        self._deadline_s = env.get_deadline_s() if deadline_s is None else deadline_s
        self._is_patient = is_patient
        # One client each: a client of several would choose by itself whom to ask.
        self._workers = [_Worker(address) for address in addresses]
        self._pool = DaemonPool(_MAX_LOOKUPS, "persia-lookup")
        self._turns = itertools.count()
        self._latencies = _Latencies()

    def lookup(self, id_features: bytes) -> LookupResult:
        """Asks an embedding worker. UnavailableError names those that do not answer."""
        deadline = Deadline(self._deadline_s)
        failure: Exception | None = None
        while True:
            asked = _Asked(self._pool, self._order(), id_features, deadline, self._latencies)
            found = asked.first_answer(is_only=len(self._workers) == 1)
            if found is not None:
                return found
            failure = asked.failure or failure
            if not self._is_patient or deadline.left_s() <= 0:
                break
            time.sleep(min(_RETRY_S, deadline.left_s()))
        failure = failure or next((w.failure for w in self._workers if w.failure is not None), None)
        within = f" within {self._deadline_s:g} s" if self._is_patient else ""
        raise UnavailableError(
            f"none of the embedding workers {', '.join(self._addresses)} answers{within}: {failure}"
        ) from failure

    def check_serving(self) -> None:
        """One worker that reaches all parameter servers is enough."""
        failures = []
        for worker in self._workers:
            try:
                worker.client.sizes(timeout_s=_TRY_S)
                return
            except (UnavailableError, DeadlineExceededError) as error:
                failures.append(f"{worker.address}: {error}")
        raise UnavailableError(f"no embedding worker serves: {'; '.join(failures)}")

    def _order(self) -> list[_Worker]:
        """The workers that are not known to be down; first those with the fewest lookups under way."""
        first = next(self._turns) % len(self._workers)
        up = [worker for worker in self._workers[first:] + self._workers[:first] if worker.failure is None]
        # So one that hangs gets no more lookups than the others, and cannot fill the pool until its time-out.
        return sorted(up, key=lambda worker: worker.num_pending)


class _Latencies:
    """The last lookups' durations, and how long a lookup waits for one worker before it asks another."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_LATENCIES)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def add_since(self, begin_s: float) -> None:
        self.add(time.monotonic() - begin_s)

    def hedge_after_s(self) -> float:
        """What 95 of 100 lookups are faster than: at most about one in 20 asks twice when all is well."""
        seconds = sorted(self._seconds.copy())  # copied: other threads add meanwhile
        if len(seconds) < _NUM_LATENCIES // 8:
            return _CHECK_S
        return max(_LEAST_HEDGE_S, seconds[len(seconds) * 95 // 100])


class _Asked:
    """One lookup at workers that are asked one after the other, each as soon as those before it are late."""

    def __init__(
        self,
        pool: DaemonPool,
        workers: Sequence[_Worker],
        id_features: bytes,
        deadline: Deadline,
        latencies: _Latencies,
    ) -> None:
        self.failure: Exception | None = None  # the last one
        self._pool = pool
        self._left = list(workers)
        self._id_features = id_features
        self._deadline = deadline
        self._latencies = latencies
        self._pending: dict[Future[LookupResult], _Worker] = {}

    def first_answer(self, *, is_only: bool) -> LookupResult | None:
        """That of whichever worker is first; None: none of them answers."""
        try:
            return self._await_first(self._latencies.hedge_after_s(), is_only)
        finally:
            # Those that no thread has begun would only hold up the lookups behind them.
            for answer, worker in self._pending.items():
                _cancel(answer, worker)

    def _await_first(self, hedge_after_s: float, is_only: bool) -> LookupResult | None:
        while self._left or self._pending:
            may_hedge = False
            if self._left and len(self._pending) < _MAX_ASKED:
                self._ask(self._left.pop(0), is_only)
                may_hedge = bool(self._left) and len(self._pending) < _MAX_ASKED
            wait_s = hedge_after_s if may_hedge else _CHECK_S
            done = wait(self._pending, wait_s, return_when=FIRST_COMPLETED).done
            for answer in done:
                del self._pending[answer]
                try:
                    return answer.result()
                except (UnavailableError, DeadlineExceededError) as error:
                    self.failure = error.with_traceback(None)  # whose frame holds this one
            if not done and wait_s >= _CHECK_S:
                self._drop_refusing(is_only)
        return None

    def _ask(self, worker: _Worker, is_only: bool) -> None:
        # The last one gets the rest of the time: there is no other to try, and it may only be slow.
        left_s = self._deadline.left_s()
        timeout_s = min(_TRY_S, left_s) if self._left else left_s
        # On a thread: the client itself repeats refused connections until its time-out.
        look_up = functools.partial(
            _timed_lookup,
            *(weakref.ref(worker), worker.client, self._id_features, timeout_s, is_only),
            # The latency includes the time in the queue of the pool, as the hedge delay does. Otherwise
            # nearly every lookup of a busy pool would be hedged.
            functools.partial(self._latencies.add_since, time.monotonic()),
        )
        worker.count_pending(1)
        self._pending[self._pool.submit(look_up)] = worker

    def _drop_refusing(self, is_only: bool) -> None:
        for answer, worker in list(self._pending.items()):
            if not answer.done() and worker.refuses():
                del self._pending[answer]
                _cancel(answer, worker)
                self.failure = UnavailableError(f"{worker.address}: connection refused")
                worker.found_down(self.failure, is_only=is_only)


def _cancel(answer: Future[LookupResult], worker: _Worker) -> None:
    if answer.cancel():  # no thread has begun it, and so none will settle it
        worker.count_pending(-1)


def _timed_lookup(
    reference: weakref.ref[_Worker],
    client: RemoteClient,
    id_features: bytes,
    timeout_s: float,
    is_only: bool,
    add_latency: Callable[[], None],
) -> LookupResult:
    # Without a reference to the worker, which the pool's thread and an error would keep.
    failure: Exception | None = None
    try:
        found = client.lookup_direct(0, id_features, requires_grad=False, timeout_s=timeout_s)
    except (UnavailableError, DeadlineExceededError) as error:
        failure = type(error)(str(error))  # a copy without a traceback, as the error has this frame
        raise
    finally:
        _settle(reference, failure, is_only)
    add_latency()
    return found


def _settle(reference: weakref.ref[_Worker], failure: Exception | None, is_only: bool) -> None:
    worker = reference()
    if worker is None:
        return
    worker.count_pending(-1)
    # Here and not where the answer is awaited: another worker may have answered meanwhile.
    if failure is not None:
        worker.found_down(failure, is_only=is_only)


class _Worker:
    """An embedding worker, and whether it is down."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = _client([address])
        self.failure: Exception | None = None  # why it is down; None: it is not, as far as is known
        self.num_pending = 0  # lookups under way, those that nobody waits for included
        self._lock = threading.Lock()

    def count_pending(self, change: int) -> None:
        with self._lock:
            self.num_pending += change

    def refuses(self) -> bool:
        """Whether nothing listens at its address."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CHECK_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # it may be slow or far away: the time-out of the lookup decides
            return False
        return False

    def found_down(self, failure: Exception, *, is_only: bool) -> None:
        """Leaves it out until it answers a thread of its own."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        if not is_only:
            get_default_logger().warning(
                "embedding worker %s does not answer, others take over: %s", self.address, failure
            )
        # Without a reference to this worker: a context that has ended must not leave a thread behind.
        arguments = (weakref.ref(self),)
        threading.Thread(target=_await, args=arguments, name="persia-probe", daemon=True).start()

    def answers(self) -> bool:
        """Whether it serves again; from then on lookups ask it."""
        try:
            self.client.sizes(timeout_s=_TRY_S)
        except PersiaError as error:
            self.failure = error.with_traceback(None)
            return False
        get_default_logger().info("embedding worker %s answers again", self.address)
        self.failure = None
        return True


def _await(reference: weakref.ref[_Worker]) -> None:
    """Asks a worker that is down until it answers, or nobody uses it any more."""
    for _ in Attempts(math.inf, pause_s=_RETRY_S):
        worker = reference()
        if worker is None or worker.answers():
            return
        del worker  # not held during the pause


def wait_for_worker(address: str, deadline: Deadline, timeout_s: float) -> None:
    """Returns once the worker, and through it every parameter server, answers. DeadlineExceededError."""
    probe = _client([address])  # one of its own: calls of a shared client go to one worker for all
    failure: Exception | None = None
    attempts = Attempts(
        max(_RETRY_S, deadline.left_s()),  # one at least: other workers may have used the deadline up
        pause_s=_RETRY_S,
        waiting_for=lambda: f"the embedding worker at {address}: {failure}",
    )
    for _ in attempts:
        try:
            probe.sizes(timeout_s=max(_RETRY_S, min(_TRY_S, deadline.left_s())))
            return
        except (UnavailableError, DeadlineExceededError) as error:
            failure = error.with_traceback(None)  # whose frame holds the probe, and this error
    raise DeadlineExceededError(
        f"the embedding worker at {address} does not serve after {timeout_s:g} s: {failure}"
    ) from failure


def _client(addresses: Sequence[str]) -> RemoteClient:
    install(INFERENCE)
    client = RemoteClient(len(addresses))
    for index, address in enumerate(addresses):
        client.set_worker(index, address)
    return client
