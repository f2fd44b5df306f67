"""The messages of the Open Inference Protocol, from open_inference.proto.

They live in a descriptor pool of their own: clients of the protocol, such as tritonclient, bring the same
names, and one pool takes a name once. So the compiled description of the .proto file is checked in
(open_inference.desc; `python -m grpc_tools.protoc` writes it, see docs/serving.md) instead of generated
Python, which always uses the common pool and asks for a runtime as new as its compiler.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"


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
