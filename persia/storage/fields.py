"""Fields of a JSON document that is read without trust; every error names the document and the field."""

from __future__ import annotations

import re
from typing import Any

from persia.errors import CorruptionError

__all__ = ["as_object", "bool_at", "hex_at", "list_at", "number_at", "text_at"]

_HEX_DIGITS = re.compile(r"(?:[0-9a-f]{2})+")


def as_object(values: object, what: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise CorruptionError(f"{what} is {values!r:.80}, not an object")
    return values


def list_at(values: dict[str, Any], key: str, what: str) -> list[Any]:
    value = values.get(key)
    if not isinstance(value, list):
        raise CorruptionError(f"{what}: {key} is {value!r:.80}, not a list")
    return value


def text_at(values: dict[str, Any], key: str, what: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise CorruptionError(f"{what}: {key} is {value!r:.80}, not a text")
    return value


def bool_at(values: dict[str, Any], key: str, what: str) -> bool:
    value = values.get(key)
    if not isinstance(value, bool):
        raise CorruptionError(f"{what}: {key} is {value!r:.80}, not true or false")
    return value


def number_at(values: dict[str, Any], key: str, what: str) -> float:
    """Finite, and not negative."""
    value = values.get(key)
    # NaN fails the comparison, too.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise CorruptionError(f"{what}: {key} is {value!r:.80}, not a non-negative number")
    return float(value)


def hex_at(values: dict[str, Any], key: str, what: str) -> str | None:
    """Bytes as digits, or null."""
    value = values.get(key)
    if value is not None and not (isinstance(value, str) and _HEX_DIGITS.fullmatch(value)):
        raise CorruptionError(f"{what}: {key} is {value!r:.80}, not hex digits")
    return value
