"""Shows the progress of long operations: a bar in a terminal during a wait, and lines in the log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from persia.logger import get_default_logger

_LOG_INTERVAL_S = 30.0


def megabytes(num_bytes: float) -> str:
    """For people: 12.3 MB, 4.56 GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


@dataclass(frozen=True)
class Progress:
    """The progress of all servers together."""

    phase: str  # "writing", "checking", "loading", "committing"
    done_bytes: int
    done_rows: int
    total_rows: int  # 0: not known


ProgressCallback = Callable[[Progress], None]


class ShownProgress:
    """Progress of one operation, which calls this on its own thread. Short operations log nothing."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next_line = time.monotonic() + _LOG_INTERVAL_S
        self._bar: ProgressCallback | None = None
        self._last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        self._last = progress
        # Read once: the waiting thread may take the bar away between two uses.
        bar = self._bar
        if bar is not None:
            bar(progress)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LOG_INTERVAL_S
            amount = megabytes(progress.done_bytes)
            get_default_logger().info("%s: %s, %s so far", self._title, progress.phase, amount)

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        """Shown inside the block, where standard error is a terminal."""
        if not sys.stderr.isatty():
            yield
            return
        # Imported late: only a process with a terminal needs it, and servers start without.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows, {task.fields[amount]}"),
            TimeElapsedColumn(),
        )
        with Bar(*columns, console=Console(stderr=True)) as shown:
            task = shown.add_task(self._title, total=None, amount="")

            def show(progress: Progress) -> None:
                shown.update(
                    task,
                    description=f"{self._title}: {progress.phase}",
                    completed=progress.done_rows,
                    total=progress.total_rows or None,
                    amount=megabytes(progress.done_bytes),
                )

            if self._last is not None:  # it has run for a while
                show(self._last)
            self._bar = show
            try:
                yield
            finally:
                self._bar = None
