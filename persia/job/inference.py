"""Embedding workers of an inference job: their addresses are known, and any of them answers any lookup."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from persia import env
from persia._native import LookupResult, RemoteClient
from persia.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from persia.logger import get_default_logger
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.queues import Deadline
from persia.pipeline.staleness import ALL_SLOTS
from persia.security import install
from persia.security.secret import INFERENCE
from persia.waiting import Attempts

__all__ = ["InferenceBackend", "RemoteRows", "wait_for_worker"]

# For one worker, as long as another is left: a worker that hangs must not use up the deadline of a lookup.
_TRY_S = 1.0
_AVOID_S = 2.0  # a worker that did not answer is asked last for so long
_RETRY_S = 0.1


class InferenceBackend(EmbeddingBackend):
    """Lookups that skip workers that are down; any worker can answer them, as none holds a batch."""

    def __init__(self, addresses: Sequence[str]) -> None:
        deadline_s = env.get_deadline_s()
        super().__init__(_client(addresses), deadline_s=deadline_s)
        self._rows = RemoteRows(addresses, deadline_s=deadline_s)

    def lookup_direct(
        self, id_features: bytes, *, requires_grad: bool, slots: int = ALL_SLOTS
    ) -> LookupResult:
        return self._rows.lookup(id_features)


class RemoteRows:
    """The rows of parameter servers, behind embedding workers that take turns.

    A worker that does not answer is left out for a while, and its lookup goes to the next one.
    """

    num_missing: int | None = None

    def __init__(self, addresses: Sequence[str], *, deadline_s: float | None = None) -> None:
        """`addresses`: "host:port" of each embedding worker; `deadline_s` of a lookup, all tries together."""
        if isinstance(addresses, str) or not addresses:
            raise InvalidArgumentError(
                f"addresses is {addresses!r}: name at least one embedding worker, ['host:port']"
            )
        self._addresses = list(addresses)
        self._deadline_s = env.get_deadline_s() if deadline_s is None else deadline_s
        # One client each: a client of several would choose by itself whom to ask.
        self._clients = [_client([address]) for address in self._addresses]
        self._avoided_until = [0.0] * len(self._clients)
        self._lock = threading.Lock()
        self._turn = 0

    def lookup(self, id_features: bytes) -> LookupResult:
        """Asks an embedding worker. UnavailableError names those that do not answer."""
        deadline = Deadline(self._deadline_s)
        order = self._order()
        failure: Exception | None = None
        for position, index in enumerate(order):
            # The last worker gets the rest of the time: there is no other to try, and it may only be slow.
            is_last = position == len(order) - 1
            timeout_s = deadline.left_s() if is_last else min(_TRY_S, deadline.left_s())
            try:
                result = self._clients[index].lookup_direct(
                    0, id_features, requires_grad=False, timeout_s=timeout_s
                )
            except (UnavailableError, DeadlineExceededError) as error:
                failure = error.with_traceback(None)  # whose frame holds the probe, and this error
                self._avoid(index, error)
                continue
            # Not locked, as all other uses: a lost update costs one lookup a wait of _TRY_S.
            self._avoided_until[index] = 0.0
            return result
        raise UnavailableError(
            f"none of the embedding workers {', '.join(self._addresses)} answers within "
            f"{self._deadline_s:g} s: {failure}"
        ) from failure

    def check_serving(self) -> None:
        """One worker that reaches all parameter servers is enough."""
        failures = []
        for address, client in zip(self._addresses, self._clients, strict=True):
            try:
                client.sizes(timeout_s=_TRY_S)
                return
            except (UnavailableError, DeadlineExceededError) as error:
                failures.append(f"{address}: {error}")
        raise UnavailableError(f"no embedding worker serves: {'; '.join(failures)}")

    def _order(self) -> list[int]:
        """All workers, beginning with the one whose turn it is; those avoided last."""
        with self._lock:
            first, self._turn = self._turn, (self._turn + 1) % len(self._clients)
        turns = [(first + i) % len(self._clients) for i in range(len(self._clients))]
        now = time.monotonic()
        # Avoided workers are tried all the same, when all others have failed. The sort is stable, so turns
        # stay in order.
        return sorted(turns, key=lambda index: self._avoided_until[index] > now)

    def _avoid(self, index: int, error: Exception) -> None:
        # Once for each outage, and not for the only worker, whose failure the lookup itself raises.
        if self._avoided_until[index] == 0.0 and len(self._clients) > 1:
            get_default_logger().warning(
                "embedding worker %s does not answer, others take over: %s", self._addresses[index], error
            )
        self._avoided_until[index] = time.monotonic() + _AVOID_S


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
