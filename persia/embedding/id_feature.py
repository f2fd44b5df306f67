"""A slot's IDs of one batch, made of whatever holds them.

IDs are kept as compressed rows (ids, offsets), which is how they travel; arrays that come as such are taken
as they are. Everything else is joined natively: no loop over samples or IDs is written in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from persia import _native, env
from persia.embedding import columns
from persia.errors import InvalidArgumentError, InvalidTypeError

MAX_BATCH_SIZE = 65535

_Item = TypeVar("_Item")

if TYPE_CHECKING:
    import torch

    _GivenIds = NDArray[np.uint64] | NDArray[np.int64] | torch.Tensor

_Ids = NDArray[np.uint64]
_Offsets = NDArray[np.uint32]
_Weights = NDArray[np.float32]


class IDTypeFeature:
    """A slot's IDs for a batch, any number per sample, with or without a weight each.

    Args:
        name: the slot's name in the embedding config.
        data: one 1-D uint64 or int64 array a sample, or torch tensors of int64; empty ones and duplicates are
            fine. A negative ID is the unsigned one of the same 64 bits, as hashes have them: -1 is 2^64 - 1.
            (`IDTypeFeature(data, name)`, the order in the published documentation, is accepted too.)
        weights: one 1-D float32 array a sample, as long as its IDs; None is 1 for all. The slot sums
            weight times row, and its mean or root divides by the weights: docs/training.md.

    `from_csr`, `from_strings`, `from_arrow`, `from_pandas` and `from_keyed_jagged_tensor` make features of
    other containers, the first of them without a copy.

    Attributes:
        ids: uint64 [total].
        offsets: uint32 [batch_size + 1]; sample i has ids[offsets[i]:offsets[i + 1]].
        weights: float32 [total], or None.

    Raises:
        InvalidTypeError: a sample is no array of IDs; names feature, sample and what was found.
        InvalidArgumentError: a sample is not 1-D, no samples, more than `MAX_BATCH_SIZE`, weights that are
            not one an ID or not finite.
    """

    name: str
    ids: _Ids
    offsets: _Offsets
    weights: _Weights | None

    def __init__(
        self, name: str, data: Sequence[_GivenIds], weights: Sequence[_Weights] | None = None
    ) -> None:
        name, data = _name_first(name, data)
        self.name = check_name(name)
        # The native walker takes lists alone, and checks each sample as it copies it.
        samples = data if isinstance(data, list) else self._listed(_without_torch(data))
        check_batch_size(len(samples), f"feature {self.name!r}")
        if _without_torch(samples[0]) is not samples[0]:
            samples = [_without_torch(sample) for sample in samples]
        self.ids, self.offsets = _native.flatten_samples(self.name, samples)
        self.weights = None if weights is None else self._joined_weights(weights)

    @classmethod
    def from_csr(
        cls,
        name: str,
        values: _GivenIds,
        offsets: NDArray[Any] | torch.Tensor,
        weights: _Weights | None = None,
    ) -> IDTypeFeature:
        """IDs that are compressed rows already. `values` and uint32 `offsets` are kept, not copied.

        Arrays may be torch tensors, too.

        Args:
            name: the slot's name in the embedding config.
            values: uint64 or int64 [total], contiguous; a negative ID is the unsigned one of the same bits.
            offsets: of any integer dtype [batch_size + 1], from 0 to total, never decreasing.
            weights: float32 [total], or None for 1 each.

        Raises:
            InvalidTypeError: another dtype or type.
            InvalidArgumentError: offsets or weights that do not fit, a wrong number of dimensions or samples.
        """
        what = f"feature {check_name(name)!r}"
        ids = _array(values, f"{what}: values", "uint64", "int64").view(np.uint64)
        bounds = _array(offsets, f"{what}: offsets", "uint32", "int32", "int64", "uint64")
        check_batch_size(len(bounds) - 1, what)
        # Checked where the error can name the feature, and not in the worker that gets the message.
        if bounds[0] != 0 or bounds[-1] != len(ids) or np.any(bounds[1:] < bounds[:-1]):
            raise InvalidArgumentError(
                f"{what}: offsets must begin with 0, never decrease and end with the number of IDs "
                f"({len(ids)}), but begin with {bounds[0]} and end with {bounds[-1]}"
            )
        return cls._of(name, ids, bounds.astype(np.uint32, copy=False), _checked_weights(what, ids, weights))

    @classmethod
    def from_strings(cls, name: str, samples: Sequence[Any] | NDArray[Any]) -> IDTypeFeature:
        """IDs of strings, by `hash_strings`.

        Args:
            name: the slot's name in the embedding config.
            samples: a string, a list of strings, or None (no ID) each.

        Raises:
            InvalidTypeError: something else; names the sample.
            InvalidArgumentError: no samples, too many, or a string that UTF-8 cannot have.
        """
        what = f"feature {check_name(name)!r}"
        listed = _strings_of(samples, what)
        check_batch_size(len(listed), what)
        return cls._of(name, *_native.flatten_strings(name, listed), None)

    @classmethod
    def from_arrow(cls, name: str, column: Any, weights: Any = None) -> IDTypeFeature:
        """IDs of an Arrow column (pyarrow, or anything with its interface, such as polars).

        Integers or strings, one a sample or lists of them, dictionary-encoded or not. Nulls are no IDs: a
        null is an empty sample, within a list it is left out. Strings become IDs by `hash_strings`.

        Args:
            name: the slot's name in the embedding config.
            column: `pyarrow.Array` or `ChunkedArray`, [batch_size].
            weights: a column of the same structure, of floats, or None for 1 each.

        Raises:
            InvalidTypeError: a column of another type; pyarrow is not installed.
            InvalidArgumentError: no samples, too many, or weights that do not fit.
        """
        what = f"feature {check_name(name)!r}"
        ids, offsets = columns.ids_of(column, what)
        check_batch_size(len(offsets) - 1, what)
        if weights is None:
            return cls._of(name, ids, offsets, None)
        # Nulls of IDs and of weights are left out separately, so only equal offsets mean equal positions.
        weight_values, weight_offsets = columns.weights_of(weights, f"weights of {what}")
        _check_same_samples(what, offsets, weight_offsets)
        return cls._of(name, ids, offsets, _checked_weights(what, ids, weight_values))

    @classmethod
    def from_pandas(cls, name: str, series: Any, weights: Any = None) -> IDTypeFeature:
        """IDs of a pandas column: as `from_arrow`, of which each of pandas' missing values is a null.

        A column of numpy's integers cannot have missing values and turns into floats, which are refused:
        use pandas' `Int64` or `UInt64`.
        """
        what = f"feature {check_name(name)!r}"
        weight_column = None if weights is None else columns.of_pandas(weights, f"weights of {what}")
        return cls.from_arrow(name, columns.of_pandas(series, what), weight_column)

    @staticmethod
    def from_keyed_jagged_tensor(keyed: Any) -> list[IDTypeFeature]:
        """One feature for each key of a torchrec `KeyedJaggedTensor`, weights included; see `from_csr`.

        Raises:
            InvalidTypeError: no such tensor, or IDs of another dtype than int64 or int32.
            InvalidArgumentError: another batch size for each key, no samples, or too many.
        """
        needed = ("keys", "values", "lengths", "weights_or_none", "variable_stride_per_key")
        if not all(hasattr(keyed, name) for name in needed):
            raise InvalidTypeError(f"keyed is a {type(keyed).__name__}: pass a torchrec KeyedJaggedTensor")
        if keyed.variable_stride_per_key():
            raise InvalidArgumentError(
                "the KeyedJaggedTensor has another batch size for each key: a batch has one for all"
            )
        names = list(keyed.keys())
        if not names:
            raise InvalidArgumentError(
                "the KeyedJaggedTensor has no keys: a batch needs at least one feature"
            )
        # `force`: the tensors may be on a GPU, or require a gradient. Lengths may be int32.
        lengths = keyed.lengths().numpy(force=True).astype(np.int64).reshape(len(names), -1)
        values = keyed.values().numpy(force=True).astype(np.int64, copy=False)
        weights = keyed.weights_or_none()
        weights = None if weights is None else weights.numpy(force=True).astype(np.float32, copy=False)
        features, begin = [], 0
        for name, counts in zip(names, lengths, strict=True):
            offsets = np.concatenate(([0], np.cumsum(counts)))
            own = slice(begin, begin + int(offsets[-1]))
            own_weights = None if weights is None else weights[own]
            features.append(IDTypeFeature.from_csr(name, values[own], offsets, own_weights))
            begin = own.stop
        return features

    @classmethod
    def _of(cls, name: str, ids: _Ids, offsets: _Offsets, weights: _Weights | None) -> Self:
        """A feature of arrays that are known to fit."""
        feature = cls.__new__(cls)
        feature.name, feature.ids, feature.offsets, feature.weights = name, ids, offsets, weights
        return feature

    def _joined_weights(self, weights: Sequence[_Weights]) -> _Weights:
        what = f"feature {self.name!r}"
        samples = list_of(weights, f"weights of {what}", "1-D float32 arrays, one a sample")
        joined, offsets = _native.flatten_weights(self.name, samples)
        _check_same_samples(what, self.offsets, offsets)
        return _checked_finite(what, joined)

    def _listed(self, data: Any) -> list[_Ids]:
        if isinstance(data, np.ndarray) and data.ndim == 1 and data.dtype != object:
            raise InvalidTypeError(
                f"feature {self.name!r} is one 1-D array: pass a list of one array a sample, "
                "or use IDTypeFeatureWithSingleID"
            )
        return list_of(data, f"feature {self.name!r}", "1-D uint64 arrays, one a sample")

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return len(self.offsets) - 1


class IDTypeFeatureWithSingleID(IDTypeFeature):
    """A slot's IDs for a batch, exactly one per sample.

    Args:
        name: the slot's name in the embedding config.
        data: uint64 or int64 [batch_size], an array or a torch tensor; see `IDTypeFeature`.
        weights: float32 [batch_size], or None for 1 each.

    Raises:
        InvalidTypeError: another dtype or type.
        InvalidArgumentError: not 1-D, no samples, more than `MAX_BATCH_SIZE`, weights that are not one an ID.
    """

    def __init__(self, name: str, data: _GivenIds, weights: _Weights | None = None) -> None:
        name, data = _name_first(name, data)
        self.name = check_name(name)
        # Unchecked, whatever numpy can make IDs of is taken.
        if not env.skip_check_data():
            data = _array(data, f"feature {self.name!r}", "uint64", "int64")
        try:
            self.ids = np.ascontiguousarray(_without_torch(data), dtype=np.uint64)
        except (TypeError, ValueError, OverflowError) as error:  # unchecked, and no numbers
            raise InvalidTypeError(f"feature {self.name!r} cannot be made uint64: {error}") from error
        if self.ids.ndim != 1:
            raise InvalidArgumentError(
                f"feature {self.name!r} has shape {self.ids.shape}: pass a 1-D array, one ID a sample"
            )
        check_batch_size(len(self.ids), f"feature {self.name!r}")
        # Always the same, but kept: features of one ID and of many are encoded by one path.
        self.offsets = np.arange(len(self.ids) + 1, dtype=np.uint32)
        self.weights = _checked_weights(f"feature {self.name!r}", self.ids, weights)


def _without_torch(data: Any) -> Any:
    """An array on the host in the place of a torch tensor; anything else as it is."""
    # Not imported: a data loader does not pay for torch, and one that passes tensors has imported it.
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", ())  # absent while another thread imports torch
    return data.numpy(force=True) if isinstance(data, tensor) else data


def _array(data: object, what: str, *dtypes: str) -> NDArray[Any]:
    """A contiguous 1-D array of one of the dtypes."""
    data = _without_torch(data)
    if not isinstance(data, np.ndarray) or data.dtype not in dtypes:
        found = f"an array of {data.dtype}" if isinstance(data, np.ndarray) else f"a {type(data).__name__}"
        raise InvalidTypeError(f"{what} is {found}: pass a numpy array of {' or '.join(dtypes)}")
    if data.ndim != 1:
        raise InvalidArgumentError(f"{what} has shape {data.shape}: pass a 1-D array")
    return np.ascontiguousarray(data)


def _checked_weights(what: str, ids: _Ids, weights: object) -> _Weights | None:
    if weights is None:
        return None
    array = _array(weights, f"weights of {what}", "float32")
    if len(array) != len(ids):
        raise InvalidArgumentError(f"{what} has {len(ids)} IDs and {len(array)} weights: pass one an ID")
    return _checked_finite(what, array)


def _checked_finite(what: str, weights: _Weights) -> _Weights:
    if not np.isfinite(weights).all():
        raise InvalidArgumentError(f"{what} has a weight that is NaN or infinite: drop its ID, or give it 0")
    return weights


def _check_same_samples(what: str, offsets: _Offsets, weight_offsets: _Offsets) -> None:
    if len(offsets) != len(weight_offsets):
        raise InvalidArgumentError(
            f"{what} has {len(offsets) - 1} samples of IDs and {len(weight_offsets) - 1} of weights"
        )
    if np.array_equal(offsets, weight_offsets):
        return
    # The first sample that differs, for the message: offsets of the samples behind it differ too.
    sample = int(np.argmax(np.diff(offsets) != np.diff(weight_offsets)))
    raise InvalidArgumentError(
        f"{what}, sample {sample}: {np.diff(offsets)[sample]} IDs and {np.diff(weight_offsets)[sample]} "
        "weights: pass one an ID"
    )


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


def _name_first(name: Any, data: Any) -> tuple[Any, Any]:
    """Accepts (data, name) too, the order of the published documentation."""
    return (data, name) if isinstance(data, str) and not isinstance(name, str) else (name, data)


def list_of(items: Sequence[_Item] | None, what: str, of: str) -> list[_Item]:
    """A list of its own; empty for None. Raises InvalidTypeError naming `what` for no sequence."""
    try:
        return [] if items is None else list(items)
    except TypeError as error:
        raise InvalidTypeError(f"{what} is a {type(items).__name__}: pass a list of {of}") from error


def hash_strings(strings: Sequence[str | bytes] | NDArray[Any]) -> NDArray[np.uint64]:
    """The IDs of strings, uint64 [len(strings)]: XXH64 with seed 0 of their UTF-8 bytes.

    Bytes are hashed as they are. The hash is part of what users store (a model knows its rows by these IDs)
    and never changes. With n distinct strings the chance that any two share an ID is about n^2 / 2^65: 3 in
    100,000 for 30 million.

    Raises:
        InvalidTypeError: not all are strings, or a single one was passed.
        InvalidArgumentError: a string that UTF-8 cannot have.
    """
    ids, _ = _native.flatten_strings("strings", [_strings_of(strings, "strings")])
    return ids


def _strings_of(samples: Any, what: str) -> Sequence[Any]:
    """A list, as the native walker takes it, also of a numpy array. Raises InvalidTypeError."""
    if isinstance(samples, np.ndarray):
        samples = samples.tolist()
    # A text is a sequence of texts, and its letters would become IDs.
    if isinstance(samples, str | bytes) or not isinstance(samples, Sequence):
        raise InvalidTypeError(f"{what} is a {type(samples).__name__}: pass a list of strings")
    return samples
