"""Inputs of the Open Inference Protocol as a batch: tensors named like features, or the bytes of a batch.

A tensor's values are an array, whichever transport brought them; strings are a list of bytes. For an ID
feature NAME there may also be NAME.lengths, the number of IDs of each sample, and NAME.weights.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.embedding.data import IDTypeFeature, NonIDTypeFeature, PersiaBatch, hash_strings
from persia.errors import InvalidArgumentError
from persia.storage.signature import DenseInput, IdInput, Signature

INPUT_NAME = "batch"
_MAX_ID_BYTES = 16 << 20  # as kMaxSampleIdBytes in serving/samples.h

_DATATYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL"}
_DTYPES = {
    name: np.dtype(name.lower().replace("fp", "float"))
    for name in ("BOOL", *(f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)))
} | {name: np.dtype(dtype) for dtype, name in _DATATYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """One input of a request."""

    name: str
    datatype: str  # the protocol's name
    shape: tuple[int, ...]
    values: NDArray[Any] | list[bytes | str]  # a list: of BYTES

    def array(self, *datatypes: str) -> NDArray[Any]:
        """Its values; InvalidArgumentError: it has none of `datatypes`."""
        if self.datatype not in datatypes or isinstance(self.values, list):
            raise InvalidArgumentError(
                f"input {self.name!r} has datatype {self.datatype!r}: send {' or '.join(datatypes)}"
            )
        return self.values


def datatype_of(dtype: str) -> str:
    """The protocol's name of a numpy dtype: int64 is INT64."""
    return _DATATYPES.get(dtype, dtype.upper())


def described(name: str, output: NDArray[Any]) -> dict[str, Any]:
    """An output as JSON has it, without its values."""
    return {"name": name, "datatype": datatype_of(output.dtype.name), "shape": list(output.shape)}


def output_name(position: int) -> str:
    """TorchScript has no names for what a model returns."""
    return f"output_{position}"


def checked_shape(name: str, datatype: str, shape: Sequence[Any], num_values: int) -> tuple[int, ...]:
    """InvalidArgumentError: the shape is none, or has another number of elements than came."""
    sizes = tuple(shape)
    if not all(isinstance(size, int) and size >= 0 for size in sizes) or math.prod(sizes) != num_values:
        raise InvalidArgumentError(
            f"input {name!r} has shape {list(sizes)} and {num_values} elements of {datatype}: they must agree"
        )
    return sizes


def tensor_of_bytes(name: str, datatype: str, shape: Sequence[Any], content: bytes) -> Tensor:
    """A tensor of little-endian bytes. InvalidArgumentError: they are none of that datatype and shape."""
    dtype = _dtype(name, datatype)
    count, rest = divmod(len(content), dtype.itemsize)
    sizes = checked_shape(name, datatype, shape, -1 if rest else count)
    if dtype.kind == "b" and len(content) and np.frombuffer(content, np.uint8).max() > 1:
        raise InvalidArgumentError(f"input {name!r} is BOOL and has bytes other than 0 and 1")
    return Tensor(name, datatype, sizes, np.frombuffer(content, dtype).reshape(sizes))


def tensor_of_list(name: str, datatype: str, shape: Sequence[Any], values: Any) -> Tensor:
    """A tensor of numbers or strings, nested or not. InvalidArgumentError: they are not of that datatype."""
    if datatype == "BYTES":
        strings = values if isinstance(values, list) else [values]
        if strings and isinstance(strings[0], list):
            # Uneven lists stay lists, which have another number of elements or are refused as strings.
            with contextlib.suppress(ValueError):
                strings = np.asarray(strings, object).ravel().tolist()
        return Tensor(name, datatype, checked_shape(name, datatype, shape, len(strings)), strings)
    dtype = _dtype(name, datatype)
    try:
        found = np.asarray(values)
        array = np.asarray(values, dtype)
    except (ValueError, TypeError, OverflowError) as failure:
        raise InvalidArgumentError(f"input {name!r} is no array of {datatype}: {failure}") from None
    # numpy would parse strings, cut fractions off and make NaN of null.
    is_number = found.dtype.kind == "b" if dtype.kind == "b" else found.dtype.kind in "iuf"
    if found.size and (not is_number or (dtype.kind in "iu" and not np.array_equal(found, array))):
        raise InvalidArgumentError(f"input {name!r} has values that are not {datatype}")
    return Tensor(
        name, datatype, sizes := checked_shape(name, datatype, shape, array.size), array.reshape(sizes)
    )


def batch_of(tensors: Sequence[Tensor], signature: Signature | None) -> PersiaBatch:
    """The batch of a request. InvalidArgumentError, CorruptionError: what is wrong with it, by name."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if list(by_name) == [INPUT_NAME] and len(tensors) == 1:
        return _batch_of_bytes(tensors[0])
    if signature is None:
        raise InvalidArgumentError(
            f"the request has the inputs {[tensor.name for tensor in tensors]}, and the checkpoint does not "
            f"name the features of its model: send one named {INPUT_NAME!r}, the bytes of "
            "PersiaBatch.to_bytes()"
        )
    if signature.repeated:
        raise InvalidArgumentError(
            f"several features of the model are named {', '.join(signature.repeated)}, so that a request "
            f"cannot name them: send one input {INPUT_NAME!r}, the bytes of PersiaBatch.to_bytes(), or train "
            "with a name for each NonIDTypeFeature"
        )
    if repeated := [name for name, count in Counter(t.name for t in tensors).items() if count > 1]:
        raise InvalidArgumentError(f"the request has the inputs {', '.join(repeated)} more than once")
    names = [*(feature.name for feature in signature.ids), *(feature.name for feature in signature.dense)]
    optional = [f"{feature.name}{kind}" for feature in signature.ids for kind in (".lengths", ".weights")]
    known = {*names, *optional}
    missing = [name for name in names if name not in by_name]
    unknown = [name for name in by_name if name not in known]
    if missing or unknown:
        raise InvalidArgumentError(
            f"the request's inputs are not the model's (missing: {', '.join(missing) or 'none'}; unknown: "
            f"{', '.join(unknown) or 'none'}): it takes {', '.join(names)}"
        )
    return PersiaBatch(
        [_id_feature(feature, by_name, names) for feature in signature.ids],
        [_dense_feature(feature, by_name[feature.name]) for feature in signature.dense],
        requires_grad=False,
    )


def json_values(output: NDArray[Any]) -> list[Any]:
    """All values, for JSON: it has neither NaN nor infinity, which are null."""
    values = output.ravel()
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return list(values.tolist())
    found = values.astype(object)
    found[~np.isfinite(values)] = None
    return list(found.tolist())


def _batch_of_bytes(tensor: Tensor) -> PersiaBatch:
    if not isinstance(tensor.values, list):
        raise InvalidArgumentError(
            f"input {INPUT_NAME!r} has datatype {tensor.datatype!r}: send BYTES, one element, which is "
            "PersiaBatch.to_bytes()"
        )
    content = tensor.values[0] if tensor.shape == (1,) else None
    if not isinstance(content, bytes):
        raise InvalidArgumentError(
            f"input {INPUT_NAME!r} has shape {list(tensor.shape)} and a {type(content).__name__}: send shape "
            "[1] and the bytes of one batch, over HTTP as binary data (binary_data_size)"
        )
    return decoded_batch(content)


def decoded_batch(content: bytes) -> PersiaBatch:
    """The batch of a request, whose IDs take a bounded multiple of its memory.

    Raises CorruptionError, ResourceExhaustedError.
    """
    return PersiaBatch.from_bytes(content, max_id_bytes=max(_MAX_ID_BYTES, len(content)))


def _id_feature(feature: IdInput, tensors: dict[str, Tensor], names: Sequence[str]) -> IDTypeFeature:
    tensor = tensors[feature.name]
    if isinstance(tensor.values, list):
        ids = hash_strings(tensor.values)
    else:
        ids = tensor.array("INT64", "UINT64", "BYTES").ravel().view(np.uint64)
    # A feature of that name is a feature of its own.
    lengths, weights = (
        None if name in names else tensors.get(name)
        for name in (f"{feature.name}.lengths", f"{feature.name}.weights")
    )
    if lengths is None:
        if len(tensor.shape) not in (1, 2):
            raise InvalidArgumentError(
                f"input {feature.name!r} has shape {list(tensor.shape)}: send [batch], [batch, k], or [n] "
                f"with {feature.name}.lengths [batch]"
            )
        each = tensor.shape[1] if len(tensor.shape) == 2 else 1
        offsets = np.arange(tensor.shape[0] + 1, dtype=np.int64) * each
    else:
        offsets = np.concatenate(([0], np.cumsum(lengths.array("INT32", "INT64").ravel(), dtype=np.int64)))
    return IDTypeFeature.from_csr(
        feature.name, ids, offsets, None if weights is None else weights.array("FP32").ravel()
    )


def _dense_feature(feature: DenseInput, tensor: Tensor) -> NonIDTypeFeature:
    return NonIDTypeFeature(tensor.array(datatype_of(feature.dtype)), feature.name)


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    dtype = _DTYPES.get(datatype)
    if dtype is None:
        raise InvalidArgumentError(f"input {name!r} has datatype {datatype!r:.40}: send {', '.join(_DTYPES)}")
    return dtype
