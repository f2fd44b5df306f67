"""What every system under test offers to the measuring loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Case
from benchmarks.workload import Batch

__all__ = ["System", "UnavailableError"]


class UnavailableError(Exception):
    """The system cannot run this case here; the message says why and is printed in place of a figure."""


class System(ABC):
    """One system, set up for one case.

    The constructor makes tables and model, and may take long. `prepare` turns a batch into what the system
    eats (row numbers, tensors of the right shape); it is never timed. `step` does the timed work on one
    prepared batch: the whole training step or the lookup, as `case.work` says. It is finished when `step`
    returns, or, of a system with several batches in flight, when `finish` does.
    """

    def __init__(self, case: Case) -> None:
        self.case = case

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """The input of `step` for `batch`; not timed."""

    @property
    @abstractmethod
    def step(self) -> Callable[[Any], object]:
        """The function that is timed."""

    def finish(self) -> None:
        """Waits for the steps that are still under way; part of the time that is measured."""
        return None

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that do the work."""

    def counters(self) -> dict[str, float]:
        """What the system says of itself after the run, for instance its number of rows."""
        return {}

    def close(self) -> None:
        """Ends what the system started."""
        return None
