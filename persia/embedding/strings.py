"""IDs of strings: XXH64 with seed 0 of their UTF-8 bytes, as every implementation of XXH64 has it.

The hash is part of what users store (a model knows its rows by these IDs) and never changes. With n distinct
strings the chance that any two share an ID is about n^2 / 2^65: 3 in 100,000 for 30 million.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia import _native
from persia.errors import InvalidTypeError

__all__ = ["hash_strings", "strings_of"]


def hash_strings(strings: Sequence[str | bytes] | NDArray[Any]) -> NDArray[np.uint64]:
    """The IDs of strings, uint64 [len(strings)]; bytes are hashed as they are.

    Raises:
        InvalidTypeError: not all are strings, or a single one was passed.
        InvalidArgumentError: a string that UTF-8 cannot have.
    """
    ids, _ = _native.flatten_strings("strings", [strings_of(strings, "strings")])
    return ids


def strings_of(samples: Any, what: str) -> Sequence[Any]:
    """What the native walker takes: a list, for an array of numpy's too. Raises InvalidTypeError."""
    if isinstance(samples, np.ndarray):
        samples = samples.tolist()
    if isinstance(samples, str | bytes) or not isinstance(samples, Sequence):
        raise InvalidTypeError(f"{what} is a {type(samples).__name__}: pass a list of strings")
    return samples
