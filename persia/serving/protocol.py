"""The messages of the Open Inference Protocol, from open_inference.proto: tensors to batches and back.

Messages live in a descriptor pool of their own: clients of the protocol, such as tritonclient, bring the same
names, and one pool takes a name once. So the compiled description of the .proto file is checked in
(open_inference.desc; `python -m grpc_tools.protoc` writes it, see docs/serving.md) instead of generated
Python, which always uses the common pool and asks for a runtime as new as its compiler.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from persia.embedding.data import PersiaBatch
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

SERVICE = "inference.GRPCInferenceService"
INPUT_NAME = "batch"

# The statuses of gRPC and HTTP for the first class that an error is an instance of.
_STATUSES: list[tuple[type[PersiaError], str, int]] = [
    (NotFoundError, "NOT_FOUND", 500),
    (InvalidArgumentError, "INVALID_ARGUMENT", 400),
    (InvalidTypeError, "INVALID_ARGUMENT", 400),
    (CorruptionError, "INVALID_ARGUMENT", 400),
    (UnavailableError, "UNAVAILABLE", 503),
    (DeadlineExceededError, "DEADLINE_EXCEEDED", 504),
    (ResourceExhaustedError, "RESOURCE_EXHAUSTED", 429),
    (FailedPreconditionError, "FAILED_PRECONDITION", 500),
    (PersiaError, "INTERNAL", 500),
]

_LENGTH = struct.Struct("<I")  # before each element of a BYTES tensor in raw_input_contents
_DATATYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL"}

_content = (resources.files("persia.serving") / "open_inference.desc").read_bytes()
(_description,) = descriptor_pb2.FileDescriptorSet.FromString(_content).file
_pool = descriptor_pool.DescriptorPool()
_pool.Add(_description)


def message(name: str) -> Any:
    """The class of a message by its name in the .proto file."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"inference.{name}"))


# (name, class of the request, class of the reply) of every method.
METHODS: list[tuple[str, Any, Any]] = [
    (
        method.name,
        message(method.input_type.rpartition(".")[2]),
        message(method.output_type.rpartition(".")[2]),
    )
    for method in _description.service[0].method
]


def batch_of(request: Any) -> PersiaBatch:
    """The batch of a ModelInferRequest. InvalidArgumentError, CorruptionError: what is wrong with it."""
    names = [tensor.name for tensor in request.inputs]
    if names != [INPUT_NAME]:
        raise InvalidArgumentError(
            f"the request has the inputs {names}: send one named {INPUT_NAME!r}, the bytes of "
            "PersiaBatch.to_bytes()"
        )
    tensor = request.inputs[0]
    if tensor.datatype != "BYTES":
        raise InvalidArgumentError(
            f"input {INPUT_NAME!r} has datatype {tensor.datatype!r}: send BYTES, one element, which is "
            "PersiaBatch.to_bytes()"
        )
    if list(tensor.shape) != [1]:
        raise InvalidArgumentError(
            f"input {INPUT_NAME!r} has shape {list(tensor.shape)}: send [1]: one batch, of any size"
        )
    return PersiaBatch.from_bytes(_element(request, tensor))


def reply_of(request: Any, model_name: str, version: str, outputs: Sequence[NDArray[Any]]) -> Any:
    """The ModelInferResponse; outputs the request names, or all. InvalidArgumentError: an unknown one."""
    reply = message("ModelInferResponse")(model_name=model_name, model_version=version, id=request.id)
    by_name = {output_name(position): output for position, output in enumerate(outputs)}
    # By the request's order: clients read raw_output_contents by position.
    for name in [output.name for output in request.outputs] or by_name:
        if name not in by_name:
            raise InvalidArgumentError(f"the model has no output {name!r}, but {', '.join(by_name)}")
        output = by_name[name]
        reply.outputs.add(name=name, datatype=datatype_of(output.dtype.name), shape=output.shape)
        reply.raw_output_contents.append(output.tobytes())
    return reply


def status_of(failure: PersiaError) -> tuple[str, int]:
    """The gRPC status by its name, and the HTTP status, which TorchServe wants."""
    return next((name, number) for kind, name, number in _STATUSES if isinstance(failure, kind))


def output_name(position: int) -> str:
    """TorchScript has no names for what a model returns."""
    return f"output_{position}"


def datatype_of(dtype: str) -> str:
    """The protocol's name of a numpy dtype: int64 is INT64."""
    return _DATATYPES.get(dtype, dtype.upper())


def _element(request: Any, tensor: Any) -> bytes:
    """The only element of a BYTES tensor, in either form of the protocol."""
    # A request may carry its tensors in either field; tritonclient uses the raw one, others may not.
    if not request.raw_input_contents:
        contents: list[bytes] = list(tensor.contents.bytes_contents)
        if len(contents) != 1:
            raise InvalidArgumentError(
                f"input {INPUT_NAME!r} has {len(contents)} elements in bytes_contents: its shape [1] says one"
            )
        return contents[0]
    if len(request.raw_input_contents) != 1:
        raise InvalidArgumentError(
            f"the request has {len(request.raw_input_contents)} raw_input_contents for one input"
        )
    raw: bytes = request.raw_input_contents[0]
    length = _LENGTH.unpack_from(raw)[0] if len(raw) >= _LENGTH.size else -1
    if length != len(raw) - _LENGTH.size:
        raise CorruptionError(
            f"raw_input_contents of {INPUT_NAME!r} has {len(raw)} bytes, which are not one BYTES element: a "
            "length of 4 bytes, little-endian, and as many bytes"
        )
    return raw[_LENGTH.size :]
