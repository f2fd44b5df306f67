"""Stage 2, beside the stream: notices that a data loader has died, whose silence alone says nothing.

A silent loader is asked whether it is alive; one that does not answer has died, and is named in the error.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from persia import env
from persia.errors import DeadlineExceededError, PersiaError, UnavailableError
from persia.logger import get_default_logger
from persia.messaging.discovery import Directory
from persia.messaging.interface import Session
from persia.messaging.subjects import DATA_LOADER
from persia.pipeline.queues import Deadline

if TYPE_CHECKING:
    from persia.pipeline.receive import Inbox

_PROBE_TIMEOUT_S = 2.0
_NUM_PROBES = 2
_REPORT_INTERVAL_S = 5.0


class LoaderWatch:
    """Judges the loaders of `inbox` when the thread that takes batches asks. `remedy`: how to start one."""

    def __init__(self, session: Session, directory: Directory, inbox: Inbox, remedy: str) -> None:
        self._session = session
        self._directory = directory
        self._inbox = inbox
        self._remedy = remedy
        self.silence_s = env.loader_silence_s()
        self._start = Deadline(env.get_deadline_s())
        self._next_report = time.monotonic() + _REPORT_INTERVAL_S

    def check(self) -> None:
        """Raises when something that the stream needs will never arrive."""
        if self._inbox.num_loaders is None:
            self._wait_for_first_loader()
        for loader_index in self._inbox.stale_loaders(self.silence_s):
            if self._is_alive(loader_index):
                self._inbox.mark_alive(loader_index)
            # Asked again, as probing takes seconds in which its batches or its end may have arrived.
            elif loader_index in self._inbox.stale_loaders(self.silence_s):
                self._give_up(loader_index)

    def _wait_for_first_loader(self) -> None:
        if self._start.over and not self._is_alive(0):
            raise DeadlineExceededError(
                f"no data loader has sent anything yet: {self._remedy} (the deadline is PERSIA_DEADLINE_SEC)"
            )
        self._report(f"waiting for the first batch of the data loaders; {self._remedy}")

    def _is_alive(self, loader_index: int) -> bool:
        """Also when that cannot be told; then the time-out of the data loader ends the wait."""
        # One lost answer is not a death: the whole job ends by the error.
        for _ in range(_NUM_PROBES):
            try:
                if self._directory.probe(DATA_LOADER, loader_index, _PROBE_TIMEOUT_S) is not None:
                    return True
                failure = "" if self._session.is_connected else "the connection to NATS is lost"
            except PersiaError as error:
                failure = str(error)
            if failure:
                # Without the broker no loader can answer, which says nothing about this one.
                self._report(f"data loader {loader_index} cannot be asked whether it is alive: {failure}")
                return True
        return False

    def _give_up(self, loader_index: int) -> None:
        if not self._inbox.has_seen(loader_index) and not self._start.over:
            self._report(f"waiting for data loader {loader_index} of {self._inbox.num_loaders}")
            return
        raise UnavailableError(
            f"data loader {loader_index} of {self._inbox.num_loaders} was silent for {self.silence_s:g} s "
            "(PERSIA_LOADER_SILENCE_SEC), did not say that its data ended and does not answer: it died"
        )

    def _report(self, text: str) -> None:
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + _REPORT_INTERVAL_S
            get_default_logger().info(text)
