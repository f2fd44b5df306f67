"""Requests of the Open Inference Protocol as JSON: those over HTTP, and those that TorchServe hands over."""

from __future__ import annotations

from typing import Any

from persia.errors import CorruptionError, InvalidArgumentError
from persia.serving.protocol import elements_of
from persia.serving.tensors import Tensor, tensor_of_bytes, tensor_of_list


def tensors_of_json(head: dict[str, Any], binary: bytes = b"") -> list[Tensor]:
    """The inputs of the request `head`; `binary` has the bytes of those that have `binary_data_size`.

    InvalidArgumentError, CorruptionError: what is wrong with one.
    """
    tensors, end = [], 0
    for values in objects_of(head, "inputs"):
        tensor, end = _tensor(values, binary, end)
        tensors.append(tensor)
    if end != len(binary):
        raise CorruptionError(f"the body has {len(binary) - end} bytes behind its last tensor")
    return tensors


def objects_of(values: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The list of objects `key`; empty without it. InvalidArgumentError: it is another value."""
    found = values.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise InvalidArgumentError(f"{key} of the request is no list of objects")
    return found


def parameters_of(values: dict[str, Any]) -> dict[str, Any]:
    """The `parameters` of a request or tensor; empty without them."""
    found = values.get("parameters", {})
    return found if isinstance(found, dict) else {}


def _tensor(values: dict[str, Any], body: bytes, begin: int) -> tuple[Tensor, int]:
    """The tensor, and where the bytes of the next one begin."""
    name, datatype, shape = (values.get(key) for key in ("name", "datatype", "shape"))
    if not isinstance(name, str) or not isinstance(datatype, str) or not isinstance(shape, list):
        raise InvalidArgumentError(
            f"an input has name {name!r:.80}, datatype {datatype!r:.40} and shape {shape!r:.80}: send text, "
            "text and a list"
        )
    size = parameters_of(values).get("binary_data_size")
    if size is None:
        return tensor_of_list(name, datatype, shape, values.get("data")), begin
    if not isinstance(size, int) or not 0 <= size <= len(body) - begin:
        raise InvalidArgumentError(
            f"binary_data_size of input {name!r} is {size!r:.40}: {len(body) - begin} bytes are left"
        )
    content = body[begin : begin + size]
    if datatype == "BYTES":
        return tensor_of_list(name, datatype, shape, elements_of(name, content)), begin + size
    return tensor_of_bytes(name, datatype, shape, content), begin + size
