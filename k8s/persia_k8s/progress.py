"""Progress that a job reports in its log.

The training script prints lines such as

    persia-progress {"step": 200, "auc": 0.89, "samplesPerSecond": 51000.0, "lastCheckpoint": "/ckpt/200"}

with any of these keys. A line of output needs no credentials in the job's pods, and a script that prints it
runs anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

PREFIX = "persia-progress "
_MAX_TEXT = 1024


def last_progress(log: str) -> dict[str, Any]:
    """The values of the log's progress lines, of each key the last one. Whatever is malformed is left out."""
    values: dict[str, Any] = {}
    for line in log.splitlines():
        _, found, text = line.partition(PREFIX)
        if found:
            values.update(_valid_values(text))
    return values


def _valid_values(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    # The log is text of the user: a malformed line must not stop the operator.
    if not isinstance(record, dict):
        return {}
    return {key: record[key] for key, is_valid in _KEYS.items() if key in record and is_valid(record[key])}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_KEYS: dict[str, Callable[[Any], bool]] = {
    # By its type: bool is an int in Python. The API server stores integers of 64 bits.
    "step": lambda value: type(value) is int and 0 <= value < 2**63,
    "auc": lambda value: _is_number(value) and 0 <= value <= 1,
    "samplesPerSecond": lambda value: _is_number(value) and value >= 0,
    "lastCheckpoint": lambda value: isinstance(value, str) and len(value) <= _MAX_TEXT,
}
