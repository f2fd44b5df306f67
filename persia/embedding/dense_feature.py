"""The dense arrays of a batch: features and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia.embedding.batch_checks import check_batch_size, check_name
from persia.embedding.dense_codec import DTYPE_NAMES, DTYPES
from persia.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["Label", "NdarrayDataBase", "NonIDTypeFeature"]


class NdarrayDataBase:
    """A named array whose first dimension is the batch.

    Args:
        data: [batch_size, ...] of bool, int8/16/32/64, uint8/16/32 or float16/32/64.
        name: for people; the class' default name when None.

    Raises:
        InvalidTypeError: not an array, or of another dtype.
        InvalidArgumentError: a scalar, or a batch size out of range.
    """

    DEFAULT_NAME = "ndarray_base"

    def __init__(self, data: NDArray[Any], name: str | None = None) -> None:
        self.name = self.DEFAULT_NAME if name is None else check_name(name)
        what = f"{type(self).__name__} {self.name!r}"
        if not env.skip_check_data():
            self._check(data, what)
        try:
            self.data = np.asarray(data)  # an array stays itself
        except ValueError as error:  # unchecked, and not rectangular
            raise InvalidTypeError(f"{what} cannot be made an array: {error}") from error
        if self.data.ndim == 0:
            raise InvalidArgumentError(f"{what} is a scalar: its first dimension must be the batch")
        check_batch_size(len(self.data), what)

    @staticmethod
    def _check(data: object, what: str) -> None:
        if not isinstance(data, np.ndarray):
            raise InvalidTypeError(f"{what} is a {type(data).__name__}: pass a numpy array")
        if data.dtype not in DTYPES:
            raise InvalidTypeError(f"{what} has dtype {data.dtype}: cast to one of {DTYPE_NAMES}")

    @property
    def batch_size(self) -> int:
        return len(self.data)

    def __len__(self) -> int:
        return len(self.data)


class Label(NdarrayDataBase):
    """A target; see `NdarrayDataBase`."""

    DEFAULT_NAME = "label_anonymous"


class NonIDTypeFeature(NdarrayDataBase):
    """Dense features; see `NdarrayDataBase`. One array of many columns is cheaper than many arrays."""

    DEFAULT_NAME = "non_id_type_feature_anonymous"
