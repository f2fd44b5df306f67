"""Checks of what users give as settings, refused by name before the compiled module sees them."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator

from persia.errors import InvalidArgumentError, InvalidTypeError


def checked_number(name: str, value: object) -> float:
    """`value` as a float. Raises InvalidTypeError naming the setting; bool is a switch, not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidTypeError(f"{name}={value!r} is a {type(value).__name__}: pass a number")
    return float(value)


def checked_integer(name: str, value: object) -> int:
    """`value` as an int. Raises InvalidTypeError naming the setting."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidTypeError(f"{name}={value!r} is a {type(value).__name__}: pass an integer")
    return int(value)


def at_least(least: int, name: str, value: object) -> int:
    """`value`, an integer of at least `least`. Raises InvalidArgumentError naming the setting."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InvalidArgumentError(f"{name} is {value!r}: it must be an integer of at least {least}")
    return int(value)


def ascending(numbers: Iterable[int], end: int) -> Iterator[int]:
    """`numbers` of batches, ascending and below `end`. Raises InvalidArgumentError for another one."""
    last = -1
    for number in numbers:
        if not last < number < end:
            place = f"follows {last}" if last >= 0 else "is the first"
            raise InvalidArgumentError(
                f"numbers has {number}, which {place}: pass each number once, in ascending order, from 0 to "
                f"{end - 1}, as there are {end} batches"
            )
        yield number
        last = number


def type_name(value: object) -> str:
    """The type of `value` with its module: Adagrad alone would name two. A class is said to be one."""
    kind = value if isinstance(value, type) else type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"the class {name}" if kind is value else name
