"""Writes a checkpoint in formats of other servers: TorchScript, torch.export, AOTInductor, ONNX, Triton."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from persia.checkpoint.checkpoints import Source
from persia.config import SlotsConfig
from persia.errors import FailedPreconditionError, InvalidArgumentError, PersiaError, StorageError
from persia.nn.export_checkpoint import export_checkpoint
from persia.nn.exported_features import ByPosition, ExportedJob
from persia.optional import needs
from persia.rows.reader import RowReader
from persia.serving.scripts import load_script
from persia.serving.tensors import output_name
from persia.serving.triton import check_names, write_repository
from persia.storage.signature import Signature
from persia.validation import to_json

__all__ = ["FORMATS", "export_to"]

INPUTS_NAME = "inputs.json"
_SAMPLES, _IDS_EACH = 3, 2  # of the example that is traced; sizes of 0 and 1 would be taken for constants


@dataclass(frozen=True)
class _Export:
    """What is written, and where."""

    job: ExportedJob
    signature: Signature
    output: Path
    name: str
    step: int | None

    def inputs(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """An example: dense, ids and lengths, as `ExportedJob` takes them."""
        dense = [
            torch.zeros(
                _SAMPLES, *(2 if size < 0 else size for size in f.shape), dtype=getattr(torch, f.dtype)
            )
            for f in self.signature.dense
        ]
        ids = [torch.zeros(_SAMPLES * _IDS_EACH, dtype=torch.int64) for _ in self.signature.ids]
        return dense, ids, [torch.full((_SAMPLES,), _IDS_EACH) for _ in self.signature.ids]

    def outputs(self) -> list[torch.Tensor]:
        """Those of the example."""
        with torch.inference_mode():
            found = self.job(*self.inputs())
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def flat_names(self) -> list[str]:
        """Names of the inputs, in the order in which the lists are flattened."""
        ids = [feature.name for feature in self.signature.ids]
        return [feature.name for feature in self.signature.dense] + ids + [f"{name}.lengths" for name in ids]


def export_to(
    checkpoint: str,
    output: Path,
    kind: str,
    slots: SlotsConfig,
    *,
    name: str = "model",
    max_bytes: int = 8 << 30,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Writes `checkpoint` to the new directory `output`; returns the files.

    A failed export writes no file to `output`.

    Args:
        checkpoint: a directory or URL with a TorchScript, or a directory of checkpoints.
        kind: one of `FORMATS`.
        slots: of the job that wrote the checkpoint.
        name: of the model in a Triton repository.
        max_bytes: of rows and keys, at most.
        on_bytes: called with the size of every read of rows, which are read twice.

    Raises:
        FailedPreconditionError: a package that the format needs is missing; the checkpoint has no signature,
            or other slots; its TorchScript cannot be traced.
        InvalidArgumentError: `output` is not empty; Triton's clients cannot use `name`, or names of features.
        ResourceExhaustedError: more than `max_bytes`.
        StorageError: `output` cannot be written, or its disk is too small.
    """
    if kind not in FORMATS:
        raise InvalidArgumentError(f"format {kind!r} is not one of {', '.join(FORMATS)}")
    # Of torch, about its own code; see persia.storage.dense for TorchScript's.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return _export_to(checkpoint, output, kind, slots, name, max_bytes, on_bytes)


def _export_to(
    checkpoint: str,
    output: Path,
    kind: str,
    slots: SlotsConfig,
    name: str,
    max_bytes: int,
    on_bytes: Callable[[int], None],
) -> list[Path]:
    require, write = FORMATS[kind]
    require()  # before minutes of reading
    source = Source(checkpoint)
    if kind == "triton" and source.signature is not None:
        check_names(name, source.signature)
    script = load_script(source)
    with _unfinished(output) as folder:
        reader = RowReader(source.location)
        job = export_checkpoint(
            reader, source.signature, slots, script, max_bytes=max_bytes, on_bytes=on_bytes
        )
        assert source.signature is not None, "export_checkpoint has checked it"
        with _storage_errors(output):
            _check_space(job, folder)
            files = write(_Export(job, source.signature, folder, name, source.manifest.step))
        return [output / file.relative_to(folder) for file in files]


@contextmanager
def _storage_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except PersiaError:  # StorageError is an OSError, too
        raise
    except OSError as failure:
        raise StorageError(f"{output} could not be written: {failure}") from failure


@contextmanager
def _unfinished(output: Path) -> Iterator[Path]:
    """A temporary directory whose files are moved to `output` at the end. A failure deletes them."""
    with _storage_errors(output):
        exists = output.exists()
        # Files of an earlier export would be taken for parts of this one.
        if exists and any(output.iterdir()):
            raise InvalidArgumentError(f"{output} is not empty: export to a new directory")
        # An existing directory may be a mounted volume, and a rename must stay within a file system.
        parent = output if exists else output.parent
        parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".persia-export-", dir=parent)
    with temporary as name:
        yield Path(name)
        with _storage_errors(output):
            # The files and not their directory: only its owner can read a temporary directory.
            output.mkdir(exist_ok=exists)
            for path in sorted(Path(name).iterdir()):
                path.rename(output / path.name)


def _check_space(job: ExportedJob, folder: Path) -> None:
    """Raises StorageError before torch fills the disk, which aborts the process."""
    num_bytes = sum(tensor.nbytes for tensor in job.state_dict().values())
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise StorageError(
            f"the export has {num_bytes:,} bytes and the disk of {folder.parent} has {free:,} bytes free: "
            "free space, or export to another disk"
        )


def _write_inputs(export: _Export) -> Path:
    path = export.output / INPUTS_NAME
    names = {
        "inputs": export.flat_names(),
        "outputs": [output_name(place) for place in range(len(export.outputs()))],
        "step": export.step,
        "signature": to_json(export.signature),
    }
    path.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    return path


def _scripted(job: ExportedJob, path: Path) -> Path:
    script = torch.jit.script(job)
    try:
        torch.jit.save(script, path)
    except RuntimeError as failure:
        raise StorageError(f"{path.name} could not be written: {failure}") from failure
    return path


def _write_torch(export: _Export) -> list[Path]:
    return [_scripted(export.job, export.output / "model.pt"), _write_inputs(export)]


def _write_triton(export: _Export) -> list[Path]:
    return write_repository(
        export.output,
        export.name,
        max(export.step or 1, 1),
        export.signature,
        export.outputs(),
        lambda path: _scripted(export.job, path),
    )


def _traced(export: _Export, trace: Callable[..., Any]) -> Any:
    """`trace(module, inputs, dynamic_shapes=)` of the job, for any number of samples and IDs."""
    inputs = export.inputs()
    dynamic = torch.export.Dim.DYNAMIC
    free = torch.export.Dim.AUTO
    dense = [
        {0: dynamic, **{axis + 1: free for axis, size in enumerate(feature.shape) if size < 0}}
        for feature in export.signature.dense
    ]
    each = [{0: dynamic} for _ in export.signature.ids]
    try:
        with torch.no_grad():
            return trace(
                _without_script(export.job, inputs), inputs, dynamic_shapes=(dense, each, each), strict=False
            )
    except Exception as failure:  # torch raises many classes
        raise FailedPreconditionError(
            "the dense model of the checkpoint cannot be traced: export it from its script with "
            "persia.nn.export(ctx), which torch traces without TorchScript, or choose the format torch; "
            f"torch says: {failure}"
        ) from failure


def _without_script(job: ExportedJob, inputs: Any) -> torch.nn.Module:
    """The job with a graph in the place of its TorchScript, which torch.export does not trace."""
    if not isinstance(job.model.model, torch.jit.ScriptModule):
        return job
    from torch._export.converter import TS2EPConverter

    dense, ids, lengths = inputs
    rows = job.features(ids, lengths)
    program = TS2EPConverter(job.model.model, (dense, rows)).convert()
    eager = ExportedJob(job.features, ByPosition(program.module()))
    # Such a graph is as it was traced, and refuses `eval()`.
    eager.training = eager.model.training = False
    return eager


def _write_torch_export(export: _Export) -> list[Path]:
    path = export.output / "model.pt2"
    torch.export.save(_traced(export, torch.export.export), path)
    return [path, _write_inputs(export)]


def _write_aoti(export: _Export) -> list[Path]:
    path = export.output / "model.pt2"
    from torch._inductor import aoti_compile_and_package

    program = _traced(export, torch.export.export)
    aoti_compile_and_package(program, package_path=str(path))
    return [path, _write_inputs(export)]


def _write_onnx(export: _Export) -> list[Path]:
    path = export.output / "model.onnx"
    names = export.flat_names()
    outputs = [output_name(place) for place in range(len(export.outputs()))]

    # From the module, as torch traces another search for ONNX; see KeyedRows.
    def trace(module: torch.nn.Module, inputs: Any, dynamic_shapes: Any, strict: bool) -> Any:
        return torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            dynamic_shapes=dynamic_shapes,
            verbose=False,
        )

    program = _traced(export, trace)
    graph = program.model.graph
    # Not by the exporter, which does not notice that a feature is named like a value of its own ("stack").
    for node in graph:
        for value in node.outputs:
            value.name = f"value.{value.name}"
    for values, given in ((graph.inputs, names), (graph.outputs, outputs)):
        for value, name in zip(values, given, strict=True):
            value.name = name
    program.save(path, external_data=True)
    return [*sorted(export.output.glob("model.onnx*")), _write_inputs(export)]


def _nothing_needed() -> None:
    pass


def _require_onnx() -> None:
    with needs("the format onnx needs onnx and onnxscript", "onnx onnxscript"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as failure:  # its own class, which moves between releases of torch
        raise FailedPreconditionError(
            f"the format aoti needs a C++ compiler ({failure}): install g++, or set CXX"
        ) from failure


FORMATS: dict[str, tuple[Callable[[], None], Callable[[_Export], list[Path]]]] = {
    "torch": (_nothing_needed, _write_torch),
    "torch-export": (_nothing_needed, _write_torch_export),
    "aoti": (_require_compiler, _write_aoti),
    "onnx": (_require_onnx, _write_onnx),
    "triton": (_nothing_needed, _write_triton),
}
