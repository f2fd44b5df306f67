"""The messages of the Open Inference Protocol, from open_inference.proto: tensors to batches and back.

Messages live in a descriptor pool of their own: clients of the protocol, such as tritonclient, bring the same
names, and one pool takes a name once. So the compiled description of the .proto file is checked in
(open_inference.desc; `python -m grpc_tools.protoc` writes it, see docs/serving.md) instead of generated
Python, which always uses the common pool and asks for a runtime as new as its compiler.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from importlib import resources
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from numpy.typing import NDArray

from persia.errors import (
    CorruptionError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    NotFoundError,
    PersiaError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.serving.batch_predict import Prediction
from persia.serving.tensors import Tensor, datatype_of, output_name, tensor_of_bytes, tensor_of_list

SERVICE = "inference.GRPCInferenceService"

# The statuses of gRPC and HTTP for the first class that an error is an instance of.
_STATUSES: list[tuple[type[BaseException], str, int]] = [
    (asyncio.CancelledError, "CANCELLED", 499),  # the client has left
    (NotFoundError, "NOT_FOUND", 500),
    (InvalidArgumentError, "INVALID_ARGUMENT", 400),
    (InvalidTypeError, "INVALID_ARGUMENT", 400),
    (CorruptionError, "INVALID_ARGUMENT", 400),
    (UnavailableError, "UNAVAILABLE", 503),
    (DeadlineExceededError, "DEADLINE_EXCEEDED", 504),
    (ResourceExhaustedError, "RESOURCE_EXHAUSTED", 429),
    (FailedPreconditionError, "FAILED_PRECONDITION", 500),
    (BaseException, "INTERNAL", 500),
]

# Numbers of gRPC's status codes.
CODES: dict[str, int] = {code.name: code.value[0] for code in grpc.StatusCode}

# A gRPC client refuses 8 KiB of metadata and more, by another status, and each byte may be quoted as three.
_MAX_MESSAGE_BYTES = 2000
_LENGTH = struct.Struct("<I")  # before each element of a BYTES tensor in binary form
# The fields of InferTensorContents.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}

_content = (resources.files("persia.serving") / "open_inference.desc").read_bytes()
(_description,) = descriptor_pb2.FileDescriptorSet.FromString(_content).file
POOL = descriptor_pool.DescriptorPool()
POOL.Add(_description)
# What server reflection tells about: of the default pool, which has no messages of ours.
POOL.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
POOL.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)


def message(name: str) -> Any:
    """The class of a message by its name in the .proto file."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


# (name, class of the request, class of the reply) of every method.
METHODS: list[tuple[str, Any, Any]] = [
    (
        method.name,
        message(method.input_type.rpartition(".")[2]),
        message(method.output_type.rpartition(".")[2]),
    )
    for method in _description.service[0].method
]


def parsed(request_class: Any, content: bytes) -> Any:
    """A message of that class. InvalidArgumentError: the bytes are none."""
    try:
        return request_class.FromString(content)
    except DecodeError:
        raise InvalidArgumentError(
            f"the request's {len(content)} bytes are no {request_class.DESCRIPTOR.name} of the Open "
            "Inference Protocol"
        ) from None


def tensors_of(request: Any) -> list[Tensor]:
    """The inputs of a ModelInferRequest. InvalidArgumentError, CorruptionError: what is wrong with one."""
    raw = request.raw_input_contents
    # A request has all of its tensors in one of the two fields; tritonclient uses the raw one.
    if not raw:
        return [_tensor_of_contents(tensor) for tensor in request.inputs]
    if len(raw) != len(request.inputs):
        raise InvalidArgumentError(
            f"the request has {len(raw)} raw_input_contents for {len(request.inputs)} inputs: send one each"
        )
    return [_tensor_of_raw(tensor, content) for tensor, content in zip(request.inputs, raw, strict=True)]


def _tensor_of_contents(tensor: Any) -> Tensor:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise InvalidArgumentError(
            f"input {tensor.name!r} has datatype {tensor.datatype!r:.40}, for which InferTensorContents has "
            "no field: send raw_input_contents"
        )
    return tensor_of_list(tensor.name, tensor.datatype, tensor.shape, list(getattr(tensor.contents, field)))


def _tensor_of_raw(tensor: Any, content: bytes) -> Tensor:
    if tensor.datatype != "BYTES":
        return tensor_of_bytes(tensor.name, tensor.datatype, tensor.shape, content)
    return tensor_of_list(tensor.name, "BYTES", tensor.shape, elements_of(tensor.name, content))


def reply_of(request: Any, model_name: str, prediction: Prediction) -> Any:
    """The ModelInferResponse; outputs the request names, or all. InvalidArgumentError: an unknown one."""
    reply = message("ModelInferResponse")(
        model_name=model_name, model_version=prediction.version, id=request.id
    )
    for name, value in prediction.parameters.items():
        reply.parameters[name].bool_param = value
    # By the request's order: clients read raw_output_contents by position.
    for name, output in named_outputs(prediction.outputs, [output.name for output in request.outputs]):
        reply.outputs.add(name=name, datatype=datatype_of(output.dtype.name), shape=output.shape)
        reply.raw_output_contents.append(output.tobytes())
    return reply


def named_outputs(outputs: Sequence[NDArray[Any]], wanted: Sequence[str]) -> list[tuple[str, NDArray[Any]]]:
    """Those of the names in `wanted`, in its order, or all. InvalidArgumentError: an unknown one."""
    by_name = {output_name(position): output for position, output in enumerate(outputs)}
    if unknown := [name for name in wanted if name not in by_name]:
        raise InvalidArgumentError(f"the model has no output {unknown[0]!r}, but {', '.join(by_name)}")
    return [(name, by_name[name]) for name in wanted or by_name]


def status_of(failure: BaseException) -> tuple[str, int]:
    """The gRPC status by its name, and the HTTP status, which TorchServe wants."""
    return next((name, number) for kind, name, number in _STATUSES if isinstance(failure, kind))


def message_of(failure: BaseException) -> str:
    """The text of an error for the client; cut, as a request has names of any length. Logs our faults."""
    message = str(failure)
    if not isinstance(failure, PersiaError):
        get_default_logger().error("a request failed", exc_info=failure)
        message = f"{type(failure).__name__}: {message}"
    text = message.encode(errors="replace")
    if len(text) <= _MAX_MESSAGE_BYTES:
        return text.decode()
    return text[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + " ..."


def elements_of(name: str, raw: bytes) -> list[bytes]:
    """The elements of a BYTES tensor in binary form. CorruptionError: lengths that do not fit."""
    found, begin = [], 0
    while begin < len(raw):
        end = begin + _LENGTH.size
        length = _LENGTH.unpack_from(raw, begin)[0] if end <= len(raw) else len(raw)
        if length > len(raw) - end:
            raise CorruptionError(
                f"the {len(raw)} binary bytes of {name!r} are no BYTES elements: send a length of 4 bytes, "
                "little-endian, and as many bytes, for each"
            )
        found.append(raw[end : end + length])
        begin = end + length
    return found
