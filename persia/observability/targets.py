"""The processes of a job as targets of Prometheus, kept up to date in a file of its `file_sd_configs`.

A process that ends in order leaves the file, so that no alert tells of it. One that is killed stays until its
successor joins: an alert is what it needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from persia.errors import StorageError, UnavailableError
from persia.messaging.discovery import Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.interface import Session
from persia.messaging.subjects import ROLES
from persia.observability.status import find_processes


def prometheus_targets(processes: Sequence[ServiceInfo]) -> list[dict[str, Any]]:
    """For Prometheus' file_sd_configs. Metrics have the labels persia_job, role and replica by themselves."""
    return [{"targets": [info.status_address for info in processes if info.status_address]}]


class TargetsFile:
    """Follows a job from its construction on; `keep` or `write` write the file."""

    def __init__(self, session: Session, path: str) -> None:
        self._session = session
        self._path = path
        self._lock = threading.Lock()  # events come on the session's threads
        self._known: dict[tuple[str, int], ServiceInfo] = {}
        self._written = ""
        directory = Directory(session)
        self._watches = [directory.watch(role, self._on_event) for role in ROLES]

    def keep(self, interval_s: float) -> None:
        """Writes the file again after each change, until Ctrl-C. Raises StorageError."""
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                self.write()
                time.sleep(interval_s)

    def write(self) -> None:
        """Looks for processes whose start was missed; writes the file if it changes. Raises StorageError."""
        # Without the broker nothing answers, and nothing is known to have left.
        with contextlib.suppress(UnavailableError):
            for info in find_processes(self._session):
                self._join(info)
        with self._lock:
            processes = [self._known[place] for place in sorted(self._known)]
        text = json.dumps(prometheus_targets(processes), indent=2)
        if text == self._written:
            return
        partial = f"{self._path}.partial"
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(partial, self._path)  # Prometheus never reads half a file
        except OSError as error:
            raise StorageError(f"cannot write the targets to {self._path}: {error.strerror}") from error
        self._written = text

    def _on_event(self, event: ServiceEvent) -> None:
        info = event.info
        if event.kind is EventKind.JOINED:
            self._join(info)
            return
        with self._lock:
            known = self._known.get((info.role, info.index))
            # Its successor may have joined already.
            if known is not None and known.incarnation == info.incarnation:
                del self._known[info.role, info.index]

    def _join(self, info: ServiceInfo) -> None:
        with self._lock:
            # Servers of another number before have ended, whether their events were received or not.
            ended = [place for place, known in self._known.items() if info.has_replaced(known)]
            for place in ended:
                del self._known[place]
            self._known[info.role, info.index] = info
