"""The features that a model was trained with: what a checkpoint tells a server about its inputs.

Models take features by position, and batches name them. So the names and their order are recorded once, and
every later batch is matched by name: in training, evaluation and serving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StrictBool

from persia.errors import InvalidArgumentError

_T = TypeVar("_T")
_Name = Annotated[str, Field(min_length=1)]
_Size = Annotated[int, Field(strict=True, ge=-1)]  # -1: another one in other batches


@dataclass(frozen=True, kw_only=True)
class IdInput:
    """An ID feature. Its name is that of its slot."""

    name: _Name
    shape: tuple[_Size, ...]  # of a sample's embedding: [dim], or [sample_fixed_size, dim + 1] where raw
    raw: StrictBool  # one row for each ID instead of their sum


@dataclass(frozen=True, kw_only=True)
class DenseInput:
    """A dense feature."""

    name: _Name
    dtype: _Name  # numpy's name
    shape: tuple[_Size, ...]  # of a sample

    def widened(self, array: NDArray[Any]) -> DenseInput:
        """With -1 for sizes that differ in `array`; raises what `check` does."""
        shape, feature = array.shape[1:], self
        if shape != self.shape and len(shape) == len(self.shape):
            sizes = zip(self.shape, shape, strict=True)
            feature = replace(self, shape=tuple(a if a == b else -1 for a, b in sizes))
        feature.check(array)
        return feature

    def check(self, array: NDArray[Any]) -> None:
        """InvalidArgumentError: an array that is no batch of this feature."""
        shape = array.shape[1:]
        fits = len(shape) == len(self.shape) and all(
            want in (-1, size) for want, size in zip(self.shape, shape, strict=True)
        )
        if array.dtype.name != self.dtype or not fits:
            raise InvalidArgumentError(
                f"dense feature {self.name!r} is {array.dtype.name}{list(array.shape)}: the model was "
                f"trained with {self.dtype}{[len(array), *self.shape]}"
            )


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs of a model, in the order of the first batch that it was trained on."""

    ids: tuple[IdInput, ...]
    dense: tuple[DenseInput, ...] = ()

    @property
    def repeated(self) -> list[str]:
        """Names that several features have: a tensor of such a name would be for which of them?"""
        names = [feature.name for feature in self.ids] + [feature.name for feature in self.dense]
        counts = Counter(names)
        return [name for name, count in counts.items() if count > 1]

    def order(self, ids: Sequence[str], dense: Sequence[str]) -> tuple[Sequence[int], Sequence[int]]:
        """Where in a batch with these features each of the signature's is.

        InvalidArgumentError names features that are unknown, missing or repeated.
        """
        return (
            _order("ID", [feature.name for feature in self.ids], ids),
            _order("dense", [feature.name for feature in self.dense], dense),
        )

    def widened(self, dense: Sequence[NDArray[Any]]) -> Signature:
        """With -1 for sizes that differ in `dense`, whose arrays are in the signature's order.

        InvalidArgumentError: another dtype, or another number of dimensions.
        """
        widened = tuple(feature.widened(array) for feature, array in zip(self.dense, dense, strict=True))
        return self if widened == self.dense else replace(self, dense=widened)


def require_finite(name: str, array: NDArray[Any]) -> None:
    """InvalidArgumentError: the dense feature has a NaN or infinity; names the first sample that has one."""
    if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
        sample = int(np.argwhere(~finite)[0][0])
        raise InvalidArgumentError(
            f"dense feature {name!r} has NaN or Inf in sample {sample}: send what training had for a missing "
            "value"
        )


def arranged(items: Sequence[_T], order: Sequence[int]) -> Sequence[_T]:
    """`items` in `order`; the same object where that is their order already."""
    return items if isinstance(order, range) else [items[position] for position in order]


def _order(kind: str, wanted: Sequence[str], given: Sequence[str]) -> Sequence[int]:
    if wanted == given:
        return range(len(given))
    places: Mapping[str, int] = {name: position for position, name in enumerate(given)}
    # Repeated names are matched by position, which is done above. Counted: a request may have any number.
    counts, expected = Counter(given), Counter(wanted)
    problems = {
        "unknown": sorted(set(given) - set(wanted)),
        "missing": [name for name in dict.fromkeys(wanted) if name not in places],
        "repeated": sorted(name for name in counts if name in expected and counts[name] != expected[name]),
    }
    if not any(problems.values()) and len(places) == len(given):
        return [places[name] for name in wanted]
    found = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
    raise InvalidArgumentError(
        f"the batch's {kind} features are not the model's ({found or 'repeated names in another order'}): "
        f"it was trained with {', '.join(wanted) or 'none'}, so send these"
    )
