"""A model repository for NVIDIA Triton: `config.pbtxt`, and a model of its Python backend without persia."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from persia.errors import FailedPreconditionError, InvalidArgumentError
from persia.serving.archive import check_name
from persia.serving.tensors import datatype_of, output_name
from persia.storage.signature import Signature
from persia.validation import to_json


def check_names(name: str, signature: Signature) -> None:
    """InvalidArgumentError: `name` is not a folder name, or several features have the same name."""
    check_name("--model-name", name)
    if signature.repeated:
        raise InvalidArgumentError(
            f"several features of the model are named {', '.join(signature.repeated)}, so that a request "
            "cannot name them: train with a name for each NonIDTypeFeature"
        )


def write_repository(
    output: Path,
    name: str,
    version: int,
    signature: Signature,
    outputs: Sequence[torch.Tensor],
    write_model: Callable[[Path], Path],
) -> list[Path]:
    """Writes `output`/`name`, which is to be copied into a repository; returns its files."""
    folder = output / name / str(version)
    folder.mkdir(parents=True)
    config = output / name / "config.pbtxt"
    config.write_text(config_text(name, signature, outputs), encoding="utf-8")
    inputs = folder / "inputs.json"
    inputs.write_text(json.dumps(to_json(signature), indent=1) + "\n", encoding="utf-8")
    script = folder / "model.py"
    script.write_text(
        importlib.resources.files("persia.serving").joinpath("triton_model.py").read_text("utf-8"), "utf-8"
    )
    return [config, script, inputs, write_model(folder / "model.pt")]


def config_text(name: str, signature: Signature, outputs: Sequence[torch.Tensor]) -> str:
    """`config.pbtxt`: inputs are named like features, as `persia-launcher serve` takes them."""
    inputs = []
    for feature in signature.ids:
        inputs += [
            _tensor(feature.name, "INT64", [-1]),
            _tensor(f"{feature.name}.lengths", "INT32", [-1], optional=True),
            _tensor(f"{feature.name}.weights", "FP32", [-1], optional=True),
        ]
    inputs += [_tensor(f.name, datatype_of(f.dtype), [-1, *f.shape]) for f in signature.dense]
    answers = []
    for place, output in enumerate(outputs):
        if output.dtype is torch.bfloat16:
            output = output.float()
        # NumPy's name, as the client sees the array.
        dtype = datatype_of(str(output.numpy().dtype.name))
        if output.dim() == 0:
            raise FailedPreconditionError(
                f"output {place} of the model has no dimension: its first one must be the batch"
            )
        answers.append(_tensor(output_name(place), dtype, [-1, *output.shape[1:]]))
    return "\n".join(
        [
            f'name: "{name}"',
            'backend: "python"',
            # 0: the first dimension is part of the shapes. IDs have another one than samples, so Triton must
            # not join requests by it.
            "max_batch_size: 0",
            _block("input", inputs),
            _block("output", answers),
            "instance_group [\n  {\n    kind: KIND_CPU\n  }\n]",
            "",
        ]
    )


def _tensor(name: str, datatype: str, dims: Iterable[int], *, optional: bool = False) -> str:
    # A name is text of the user; JSON's quotes and escapes are those of the text format.
    lines = [
        f"name: {json.dumps(name)}",
        f"data_type: TYPE_{datatype}",
        f"dims: [ {', '.join(map(str, dims))} ]",
        *(["optional: true"] if optional else []),
    ]
    return "  {\n" + "".join(f"    {line}\n" for line in lines) + "  }"


def _block(kind: str, tensors: Sequence[str]) -> str:
    return f"{kind} [\n" + ",\n".join(tensors) + "\n]"
