"""Watching a job run: metrics, health, status and traces of every process, over one HTTP port of each.

Scripts need one name of it: `report(auc=0.79, step=1200)` shows the job's own numbers beside ours.
docs/operations.md has the rest.
"""

from __future__ import annotations

import math
import re
import threading

from persia.errors import InvalidArgumentError, InvalidTypeError, ResourceExhaustedError

__all__ = ["finite_reported", "report", "reported"]

_MAX_NAMES = 100  # each is a time series for as long as Prometheus remembers
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

_lock = threading.Lock()
_values: dict[str, float] = {}


def report(**values: float) -> None:
    """Shows numbers of the job in metrics and `persia-launcher status`: `report(step=1200, auc=0.79)`.

    `values` are numbers by their name; the latest value of each name counts. Metrics have it as
    `persia_reported{name="auc"}`. Cheap enough for every step. Raises InvalidTypeError for what is no number,
    ResourceExhaustedError above 100 names.
    """
    for name, value in values.items():
        # bool is an int in Python; a flag reported by mistake would be drawn as 0 and 1.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidTypeError(f"report: {name} is a {type(value).__name__}: give a number (loss.item())")
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"report: {name!r} is no name: use letters, digits and '_'")
    with _lock:
        if len(_values.keys() | values.keys()) > _MAX_NAMES:
            raise ResourceExhaustedError(
                f"report: more than {_MAX_NAMES} names: report few names with changing values"
            )
        _values.update((name, float(value)) for name, value in values.items())


def reported() -> dict[str, float]:
    """The latest value of each name given to `report`."""
    with _lock:
        return dict(_values)


def finite_reported() -> dict[str, float]:
    """Without NaN and infinities, which JSON does not have."""
    return {name: value for name, value in reported().items() if math.isfinite(value)}
