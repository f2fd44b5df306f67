"""What `--max-restarts` of `persia-launcher local` and `ray submit` does when a process of the job dies.

Pure: decides, and starts nothing. A data loader, an embedding worker and the NATS server are restarted alone:
ranks know what they have of each loader, register the batches of a dead worker again, and all processes
connect to NATS again. When a rank or a server dies, the whole job but NATS is started again: nothing of the
old ranks and embedding workers may reach the rows that the new ranks load, and a restarted server needs them
from a checkpoint. A parameter server whose standby runs, or a standby, is restarted alone: it becomes the
standby of the other one.
"""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence

from persia.launcher.nats_server import NATS
from persia.launcher.process_specs import STANDBY
from persia.launcher.supervisor import ProcessSpec, SupervisedProcess
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER

# What dies so soon after a restart will probably die again. More than its start takes: a shorter time
# would never pause a job that always fails right after it.
_QUICK_S = 60.0
_SHORTEST_S, _LONGEST_S = 1.0, 30.0


class Restarts:
    """Counts the restarts of a job: at most `limit` of them, with pauses that grow while they do not help."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        # When it was started last, and after which pause, by the name of a process; "": all of them.
        self._last: dict[str, tuple[float, float]] = {}
        self.deaths = Counter[str]()  # by name of the process that died
        self._due: dict[str, tuple[float, ProcessSpec]] = {}  # when to start what, by its name

    @property
    def count(self) -> int:
        return self.deaths.total()

    @property
    def exhausted(self) -> bool:
        return self.count >= self._limit

    def next_pause_s(self, name: str, *, alone: bool = True) -> float:
        """Counts a restart as `name` has died; returns the seconds to wait before it.

        A process that is started again `alone` waits for its own earlier deaths, not for those of others: a
        standby that waits leaves its server without one.
        """
        self.deaths[name] += 1
        key = name if alone else ""
        last, pause_s = self._last.get(key, (-math.inf, 0.0))
        quick = self._clock() - last < _QUICK_S
        pause_s = min(_LONGEST_S, max(_SHORTEST_S, 2 * pause_s)) if quick else 0.0
        self._last[key] = self._clock() + pause_s, pause_s
        return pause_s

    def add(
        self, ended: SupervisedProcess, specs: Sequence[ProcessSpec], tell: Callable[[str], None]
    ) -> None:
        """Makes `specs` due after the pause, as `ended` has died. `tell` gets one line about it."""
        alone = len(specs) == 1
        pause_s = self.next_pause_s(ended.name, alone=alone)
        what = "it is started again" if alone else "every process is started again"
        tell(f"{ended.name} {how_it_ended(ended)}; {what} in {pause_s:g} s ({self})")
        at = self._clock() + pause_s
        self._due |= {spec.name: (at, spec) for spec in specs}

    def is_waiting(self, name: str) -> bool:
        """Whether the process will be started again."""
        return name in self._due

    @property
    def next_due_s(self) -> float:
        """Seconds until a process is due; infinite if none is."""
        return max(0.0, min((at for at, _ in self._due.values()), default=math.inf) - self._clock())

    def take_due(self) -> list[ProcessSpec]:
        """The processes to start now, in the order in which they were added."""
        due = [spec for at, spec in self._due.values() if at <= self._clock()]
        for spec in due:
            del self._due[spec.name]
        return due

    def __str__(self) -> str:
        """Such as "restart 2 of 5"."""
        return f"restart {self.count} of {self._limit}"

    def summary(self) -> str:
        """One line for the end of the job."""
        names = ", ".join(f"{name} {count}" for name, count in sorted(self.deaths.items()))
        return f"restarts: {self.count} of {self._limit} ({names})"


def restarts_alone(ended: SupervisedProcess, partner: SupervisedProcess | None) -> bool:
    """Whether the others may continue. A loader that raised has told the ranks, which end with its error.

    `partner`: the other one of a parameter server and its standby.
    """
    if ended.name.startswith(f"{EMBEDDING_PARAMETER_SERVER}-"):
        return partner is not None and partner.exit_code is None
    was_killed = ended.exit_code is not None and ended.exit_code < 0
    return ended.name == NATS or (
        ended.name.startswith(("data-loader-", f"{EMBEDDING_WORKER}-")) and was_killed
    )


def partner_of(name: str) -> str:
    """The name of a parameter server's standby, or the other way round."""
    return name.removesuffix(STANDBY) if name.endswith(STANDBY) else name + STANDBY


def how_it_ended(process: SupervisedProcess) -> str:
    """Such as "was ended by SIGKILL"."""
    code = process.exit_code or 0
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was ended by signal {-code}"
