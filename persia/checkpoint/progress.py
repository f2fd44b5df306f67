"""Progress of long operations: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from persia.checkpoint.coordinator import Progress, ProgressCallback
from persia.logger import get_default_logger

__all__ = ["megabytes", "shown_progress"]

_LOG_INTERVAL_S = 30.0


def megabytes(num_bytes: float) -> str:
    """For people: 12.3 MB, 4.56 GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


@contextlib.contextmanager
def shown_progress(title: str, *, bar: bool) -> Iterator[ProgressCallback]:
    """Yields what an operation calls with its progress. `bar`: when standard error is a terminal."""
    if not (bar and sys.stderr.isatty()):
        yield _Log(title)
        return
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
        task = shown.add_task(title, total=None, amount="")

        def show(progress: Progress) -> None:
            shown.update(
                task,
                description=f"{title}: {progress.phase}",
                completed=progress.done_rows,
                total=progress.total_rows or None,
                amount=megabytes(progress.done_bytes),
            )

        yield show


class _Log:
    """Nothing for what ends soon."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next = time.monotonic() + _LOG_INTERVAL_S

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LOG_INTERVAL_S
            get_default_logger().info(
                "%s: %s, %s so far", self._title, progress.phase, megabytes(progress.done_bytes)
            )
