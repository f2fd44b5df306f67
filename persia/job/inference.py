"""Embedding workers of an inference job: their addresses are known, and any of them answers any lookup."""

from __future__ import annotations

import functools
import itertools
import math
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait

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

__all__ = ["InferenceBackend", "RemoteRows", "wait_for_worker"]

# For one worker, as long as another is left: a worker that hangs must not use up the deadline of a lookup.
_TRY_S = 1.0
_CHECK_S = 0.05  # a lookup without an answer for so long finds out whether anything listens there
_RETRY_S = 0.1
_MAX_LOOKUPS = 64  # under way at a time; those that are given up end by their time-out


class InferenceBackend(EmbeddingBackend):
    """Lookups that skip workers that are down; any worker can answer them, as none holds a batch."""

    def __init__(self, addresses: Sequence[str]) -> None:
        deadline_s = env.get_deadline_s()
        super().__init__(_client(addresses), deadline_s=deadline_s)
        self._rows = RemoteRows(addresses, deadline_s=deadline_s, is_patient=True)

    def lookup_direct(
        self, id_features: bytes, *, requires_grad: bool, slots: int = ALL_SLOTS
    ) -> LookupResult:
        return self._rows.lookup(id_features)


class RemoteRows:
    """The rows of parameter servers, behind embedding workers that take turns.

    A worker that refuses connections or does not answer is left out, and its lookup goes to the next one. A
    thread asks it again until it answers: lookups never try whether a worker is back.
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

    def lookup(self, id_features: bytes) -> LookupResult:
        """Asks an embedding worker. UnavailableError names those that do not answer."""
        deadline = Deadline(self._deadline_s)
        failure: Exception | None = None
        while True:
            order = self._order()
            for position, worker in enumerate(order):
                # The last one gets the rest of the time: there is no other to try, and it may only be slow.
                is_last = position == len(order) - 1
                timeout_s = deadline.left_s() if is_last else min(_TRY_S, deadline.left_s())
                try:
                    return self._ask(worker, id_features, timeout_s)
                except (UnavailableError, DeadlineExceededError) as error:
                    failure = error.with_traceback(None)  # whose frame holds this one
                    worker.found_down(failure, is_only=len(self._workers) == 1)
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
        """The workers that are not known to be down, beginning with the one whose turn it is."""
        first = next(self._turns) % len(self._workers)
        return [worker for worker in self._workers[first:] + self._workers[:first] if worker.failure is None]

    def _ask(self, worker: _Worker, id_features: bytes, timeout_s: float) -> LookupResult:
        # On a thread: the client itself repeats refused connections until its time-out.
        answer: Future[LookupResult] = self._pool.submit(
            functools.partial(
                worker.client.lookup_direct, 0, id_features, requires_grad=False, timeout_s=timeout_s
            )
        )
        while not wait([answer], _CHECK_S).done:
            if worker.refuses():
                raise UnavailableError(f"{worker.address}: connection refused")
        return answer.result()


class _Worker:
    """An embedding worker, and whether it is down."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = _client([address])
        self.failure: Exception | None = None  # why it is down; None: it is not, as far as is known
        self._lock = threading.Lock()

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
