"""Ranges in names of slots: `C{1..26}` stands for C1 to C26, and is expanded when a config is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from persia.validation import complaint

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_NAMES = 100_000  # a typing mistake must not fill the memory


def expanded(name: str) -> list[str]:
    """The names that `name` stands for: itself, or one for each number of its one range, as in a shell.

    `{01..26}` pads numbers to the width of the first. Raises pydantic's complaint for a range that counts
    down, is too long, or is not alone.
    """
    ranges = list(_RANGE.finditer(name))
    if not ranges:
        return [name]
    first, last = (int(number) for number in ranges[0].groups())
    if len(ranges) > 1:
        raise complaint(f"{name!r} has {len(ranges)} ranges: write one key for each value of the first")
    if not first <= last < first + _MAX_NAMES:
        raise complaint(
            f"{name!r} must count up, over at most {_MAX_NAMES} numbers: {{1..26}} is 1, 2, ... 26"
        )
    begin, end = name[: ranges[0].start()], name[ranges[0].end() :]
    # As shells do: a leading zero says that all numbers have its width.
    width = len(ranges[0][1]) if ranges[0][1].startswith("0") else 0
    return [f"{begin}{number:0{width}}{end}" for number in range(first, last + 1)]


def expanded_keys(slots: Any) -> Any:
    """Expands every range in the keys of a mapping. A name that is also written out keeps its own value.

    Each name takes the place of the first key that yields it. Raises pydantic's complaint if two ranges
    yield the same name.
    """
    if not isinstance(slots, Mapping):
        return slots  # refused by its type
    sources: dict[Any, Any] = {}
    for key in slots:
        for name in expanded(key) if isinstance(key, str) else [key]:
            # So one slot of a range can differ from the others: its own key wins.
            source = name if name in slots else key
            if sources.setdefault(name, source) != source:
                raise complaint(
                    f"{sources[name]!r} and {key!r} both yield the slot {name}: let ranges not overlap, or "
                    "add a key for this name alone"
                )
    return {name: slots[key] for name, key in sources.items()}


def expanded_groups(groups: Any) -> Any:
    """Lists of slots with their ranges expanded."""
    lists = isinstance(groups, Mapping) and all(isinstance(slots, list | tuple) for slots in groups.values())
    if not lists:
        return groups  # refused by its type
    return {
        group: [name for slot in slots for name in (expanded(slot) if isinstance(slot, str) else [slot])]
        for group, slots in groups.items()
    }
