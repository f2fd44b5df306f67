"""The batch a loader sends: ID features, dense features, labels and metadata, checked when it is built."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia import _native, env
from persia.embedding.dense_codec import DTYPE_NAMES, DTYPES, decode_dense, encode_dense
from persia.embedding.id_feature import (
    MAX_BATCH_SIZE,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    check_batch_size,
    check_name,
    hash_strings,
    list_of,
)
from persia.errors import CorruptionError, FailedPreconditionError, InvalidArgumentError, InvalidTypeError

__all__ = [
    "MAX_BATCH_SIZE",
    "IDTypeFeature",
    "IDTypeFeatureWithSingleID",
    "Label",
    "NdarrayDataBase",
    "NonIDTypeFeature",
    "PersiaBatch",
    "hash_strings",
    "split_batches",
]

_MAGIC = 0x54414250  # "PBAT"
_VERSION = 1
_HEADER = struct.Struct("<4I2Q")  # magic, version, requires_grad, reserved, id_bytes, dense_bytes


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
        # Checks per array cost microseconds, which loaders of thousands of small batches can save.
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
        """The number of samples."""
        return len(self.data)

    def __len__(self) -> int:
        return len(self.data)


class Label(NdarrayDataBase):
    """A target; see `NdarrayDataBase`."""

    DEFAULT_NAME = "label_anonymous"


class NonIDTypeFeature(NdarrayDataBase):
    """Dense features; see `NdarrayDataBase`. One array of many columns is cheaper than many arrays."""

    DEFAULT_NAME = "non_id_type_feature_anonymous"


class PersiaBatch:
    """One batch of training, evaluation or inference data.

    Args:
        id_type_features: at least one, names unique.
        non_id_type_features: dense features, in the order the model gets them.
        labels: needed when `requires_grad`.
        batch_size: checked against the features when given.
        requires_grad: False for evaluation: looked up without inserting, no gradient expected.
        meta: bytes that reach the NN worker with the batch (a str is encoded as UTF-8).

    Raises:
        InvalidTypeError: something of another class.
        InvalidArgumentError: batch sizes that differ, a repeated name, labels missing.
    """

    def __init__(
        self,
        id_type_features: Sequence[IDTypeFeature],
        non_id_type_features: Sequence[NonIDTypeFeature] | None = None,
        labels: Sequence[Label] | None = None,
        batch_size: int | None = None,
        requires_grad: bool = True,
        meta: bytes | str | None = None,
    ) -> None:
        self.id_type_features = list_of(id_type_features, "id_type_features", "IDTypeFeature objects")
        self.non_id_type_features = list_of(
            non_id_type_features, "non_id_type_features", "NonIDTypeFeature objects"
        )
        self.labels = list_of(labels, "labels", "Label objects")
        self.requires_grad = bool(requires_grad)
        self.meta = _meta_bytes(meta)
        if not self.id_type_features:
            raise InvalidArgumentError("a batch needs at least one ID feature: id_type_features is empty")
        self._check_classes()
        self._check_names()
        # The size of the first feature, with which `_check_sizes` compares all others.
        self.batch_size = self.id_type_features[0].batch_size if batch_size is None else batch_size
        self._check_sizes()
        if requires_grad and not self.labels:
            raise InvalidArgumentError(
                "no labels: add label data when requires_grad is True, as labels=[Label(array)]; a batch to "
                "evaluate or predict may have none, with requires_grad=False"
            )
        # A batch registers its IDs at a worker when it is sent: a second time, it would train twice.
        self._sent = False

    def _check_classes(self) -> None:
        # Named by their position: an object of another class has no name to tell.
        for argument, found, expected in (
            ("id_type_features", self.id_type_features, IDTypeFeature),
            ("non_id_type_features", self.non_id_type_features, NonIDTypeFeature),
            ("labels", self.labels, Label),
        ):
            for position, item in enumerate(found):
                if not isinstance(item, expected):
                    raise InvalidTypeError(
                        f"{argument}[{position}] is a {type(item).__name__}: pass {expected.__name__} objects"
                    )

    def _check_names(self) -> None:
        # A name is a slot, whose embeddings and gradients could be those of either.
        counts = Counter(feature.name for feature in self.id_type_features)
        for name, count in counts.items():
            if count > 1:
                raise InvalidArgumentError(f"ID feature {name!r} occurs {count} times in the batch: keep one")

    def _check_sizes(self) -> None:
        check_batch_size(self.batch_size, "the batch")
        items: list[IDTypeFeature | NdarrayDataBase]
        items = [*self.id_type_features, *self.non_id_type_features, *self.labels]
        for item in items:
            if item.batch_size != self.batch_size:
                raise InvalidArgumentError(
                    f"{type(item).__name__} {item.name!r} has {item.batch_size} samples "
                    f"in a batch of {self.batch_size}"
                )

    @property
    def num_ids(self) -> int:
        """IDs of all features, repetitions counted."""
        return sum(len(feature.ids) for feature in self.id_type_features)

    def encode_id_features(self) -> bytes:
        """The ID features as the wire format's "ID features"."""
        return _native.encode_id_features(
            self.batch_size, [(f.name, f.ids, f.offsets, f.weights) for f in self.id_type_features]
        )

    def encode_dense(self) -> bytes:
        """Everything else as the wire format's "dense section"."""
        return encode_dense(
            [(f.name, f.data) for f in self.non_id_type_features],
            [(label.name, label.data) for label in self.labels],
            self.meta,
            self.batch_size,
        )

    def to_bytes(self) -> bytes:
        """The whole batch as bytes, for instance for an inference request."""
        ids, dense = self.encode_id_features(), self.encode_dense()
        return _HEADER.pack(_MAGIC, _VERSION, self.requires_grad, 0, len(ids), len(dense)) + ids + dense

    @classmethod
    def from_bytes(
        cls, message: bytes | bytearray | memoryview, *, max_id_bytes: int = 1 << 30
    ) -> PersiaBatch:
        """The batch that `to_bytes` wrote. Raises CorruptionError for anything else.

        IDs may take 8 times the memory of the message. Raises ResourceExhaustedError where they take more
        than `max_id_bytes`.
        """
        # A copy: arrays of the batch are views of it, and the caller may fill its buffer anew.
        data = bytes(message)
        if len(data) < _HEADER.size:
            raise CorruptionError(f"a batch of {len(data)} bytes is cut short: its header has {_HEADER.size}")
        magic, version, requires_grad, _, id_bytes, dense_bytes = _HEADER.unpack_from(data)
        # Before the sizes: those of other bytes mean nothing.
        if magic != _MAGIC or version != _VERSION or requires_grad > 1:
            raise CorruptionError(f"not a batch of version {_VERSION}: magic {magic:#x}, version {version}")
        if _HEADER.size + id_bytes + dense_bytes != len(data):
            raise CorruptionError(
                f"a batch has {len(data)} bytes, and by its header {_HEADER.size + id_bytes + dense_bytes}: "
                "give all that to_bytes() returned, and nothing else"
            )
        body = memoryview(data)[_HEADER.size :]
        try:
            features = _native.decode_id_features(body[:id_bytes], max_id_bytes)
            ids = [IDTypeFeature._of(*feature) for feature in features]
            dense = decode_dense(body[id_bytes:])
            return cls(
                ids,
                [NonIDTypeFeature(array, name) for name, array in dense.features],
                [Label(array, name) for name, array in dense.labels],
                batch_size=dense.batch_size,
                requires_grad=bool(requires_grad),
                meta=dense.meta,
            )
        except (InvalidArgumentError, InvalidTypeError) as error:  # well-formed, but such as a name twice
            raise CorruptionError(f"the bytes decode, but to no valid batch: {error}") from error

    def mark_sent(self) -> None:
        """Called when the batch is sent or looked up. Raises FailedPreconditionError the second time."""
        if self._sent:
            raise FailedPreconditionError("this PersiaBatch was sent already: build a new one for every send")
        self._sent = True


def split_batches(content: bytes) -> list[bytes]:
    """The messages of `PersiaBatch.to_bytes` that follow each other in `content`, for `from_bytes`.

    Raises CorruptionError if the last one is cut short, or anything else is between them.
    """
    found, begin = [], 0
    while begin < len(content):
        if len(content) - begin < _HEADER.size:
            raise CorruptionError(f"byte {begin}: the last batch is cut short")
        magic, version, _, _, id_bytes, dense_bytes = _HEADER.unpack_from(content, begin)
        if magic != _MAGIC or version != _VERSION:
            raise CorruptionError(f"byte {begin}: not a batch of version {_VERSION}")
        end = begin + _HEADER.size + id_bytes + dense_bytes
        if end > len(content):
            raise CorruptionError(f"byte {begin}: the last batch is cut short")
        found.append(content[begin:end])
        begin = end
    return found


def _meta_bytes(meta: object) -> bytes | None:
    if meta is None or isinstance(meta, bytes):
        return meta
    if isinstance(meta, str):
        return meta.encode()
    raise InvalidTypeError(
        f"meta is a {type(meta).__name__}: pass bytes, for instance json.dumps(...).encode()"
    )
