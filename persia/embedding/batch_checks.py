"""What holds for every part of a batch, and the messages for what does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from persia.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["MAX_BATCH_SIZE", "check_batch_size", "check_name", "list_of", "name_first"]

MAX_BATCH_SIZE = 65535

_Item = TypeVar("_Item")


def check_batch_size(batch_size: int, what: str) -> None:
    """Raises InvalidArgumentError for none and for more than `MAX_BATCH_SIZE` samples."""
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise InvalidArgumentError(
            f"{what} has {batch_size} samples: a batch has 1 to {MAX_BATCH_SIZE}, split it"
        )


def check_name(name: object) -> str:
    """The name of a feature. Raises InvalidTypeError for what is none."""
    if not isinstance(name, str) or not name:
        raise InvalidTypeError(f"feature name is {name!r}: pass a non-empty str")
    return name


def name_first(name: Any, data: Any) -> tuple[Any, Any]:
    """Accepts (data, name) too, the order of the published documentation."""
    return (data, name) if isinstance(data, str) and not isinstance(name, str) else (name, data)


def list_of(items: Sequence[_Item] | None, what: str, of: str) -> list[_Item]:
    """A list of its own; empty for None. Raises InvalidTypeError naming `what` for no sequence."""
    try:
        return [] if items is None else list(items)
    except TypeError as error:
        raise InvalidTypeError(f"{what} is a {type(items).__name__}: pass a list of {of}") from error
