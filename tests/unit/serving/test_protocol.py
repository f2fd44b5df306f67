"""The checked-in description of the protocol is that of its .proto file."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from persia.serving.protocol import METHODS, message

FOLDER = Path(str(resources.files("persia.serving")))


def description(content: bytes) -> descriptor_pb2.FileDescriptorSet:
    return descriptor_pb2.FileDescriptorSet.FromString(content)


def test_the_description_is_compiled_from_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools (the 'test' extra)")
    compiled = tmp_path / "open_inference.desc"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={compiled}"]
    subprocess.run([*command, "open_inference.proto"], cwd=FOLDER, check=True, timeout=240)
    checked_in = description((FOLDER / "open_inference.desc").read_bytes())
    assert checked_in == description(compiled.read_bytes()), "compile it again: see open_inference.proto"


def test_names_and_numbers_are_those_of_tritonclient() -> None:
    """Whatever we can say, an independent implementation of the protocol says with the same bytes."""
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2", reason="needs tritonclient[grpc]")
    for name, request, reply in METHODS:
        for ours in (request, reply):
            compare(ours.DESCRIPTOR, theirs.DESCRIPTOR.message_types_by_name[ours.DESCRIPTOR.name], name)
    compare(
        message("InferTensorContents").DESCRIPTOR,
        theirs.DESCRIPTOR.message_types_by_name["InferTensorContents"],
        "ModelInfer",
    )


def compare(ours: object, theirs: object, where: str) -> None:
    for field in ours.fields:  # type: ignore[attr-defined]
        other = theirs.fields_by_name[field.name]  # type: ignore[attr-defined]
        assert (field.number, field.type) == (other.number, other.type), (where, field.full_name)
        if field.message_type is not None:
            compare(field.message_type, other.message_type, where)
