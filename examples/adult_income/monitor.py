"""What a person and the history see of a run: progress, throughput, batches in flight."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from history import HistoryWriter

WINDOW_STEPS = 20
NUM_PLAIN_LINES = 10


class Throughput:
    """Samples per second; the clock starts with the first step's end and stands still while `paused`.

    The first step is left out: it waits for the data loader to start, which says nothing about training.
    """

    def __init__(self, samples_per_step: int) -> None:
        self._samples_per_step = samples_per_step
        self._ends_s: deque[float] = deque(maxlen=WINDOW_STEPS + 1)
        self._first_end_s = 0.0
        self._num_steps = 0
        self._paused_s = 0.0

    def step(self) -> None:
        end_s = time.perf_counter() - self._paused_s
        self._first_end_s = self._first_end_s or end_s
        self._ends_s.append(end_s)
        self._num_steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - start_s

    def recent(self) -> float:
        """Over the last WINDOW_STEPS steps; 0.0 until there are two."""
        return self._rate(len(self._ends_s) - 1, self._ends_s[-1] - self._ends_s[0])

    def overall(self) -> float:
        """Over the whole run so far; 0.0 until there are two steps."""
        return self._rate(self._num_steps - 1, self._ends_s[-1] - self._first_end_s) if self._ends_s else 0.0

    def _rate(self, num_steps: int, duration_s: float) -> float:
        return num_steps * self._samples_per_step / duration_s if duration_s > 0 else 0.0


def step_bar() -> Progress | None:
    """A progress bar over steps; None where the output is no terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return Progress(*columns) if sys.stdout.isatty() else None


class Monitor:
    """Reports each step: a progress bar on a terminal, about ten lines elsewhere; always the history."""

    def __init__(self, num_steps: int, samples_per_step: int, history: HistoryWriter) -> None:
        self._num_steps = num_steps
        self._history = history
        self.throughput = Throughput(samples_per_step)
        self.max_staleness = 0
        self._progress = step_bar()
        self._task = self._progress.add_task("waiting for data", total=num_steps) if self._progress else None

    def __enter__(self) -> None:
        if self._progress:
            self._progress.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def step(self, step: int, loss: float, in_flight: int) -> None:
        """`step` counts from 1; `in_flight` are the batches between lookup and acknowledged update now."""
        self.throughput.step()
        self.max_staleness = max(self.max_staleness, in_flight)
        speed = self.throughput.recent()
        self._history.write(step, loss=loss, staleness=in_flight, samples_per_second=speed)
        text = f"loss {loss:.4f}  in flight {in_flight}  {speed:,.0f} samples/s"
        if self._progress and self._task is not None:
            self._progress.update(self._task, completed=step, description=text)
        elif step % max(1, self._num_steps // NUM_PLAIN_LINES) == 0 or step == self._num_steps:
            print(f"step {step}/{self._num_steps}  {text}", flush=True)

    def evaluated(self, step: int, test_auc: float) -> None:
        self._history.write(step, test_auc=test_auc)
        print(f"step {step}/{self._num_steps}  test AUC {test_auc:.7f}", flush=True)
