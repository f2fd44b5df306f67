"""The dense part of a checkpoint: model, optimizer and TorchScript files, each replaced in one step.

A file appears under its name only when it is complete, so writing again over an old checkpoint is safe, also
for several ranks at a time and when a process dies meanwhile.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch.nn.parallel import DistributedDataParallel

from persia.errors import InvalidArgumentError, InvalidTypeError, NotFoundError, StorageError

__all__ = ["dump_state_dict", "dump_torchscript", "load_state_dict", "local_path", "unwrap"]

_DDP_PREFIX = "module."


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's model inside a DDP wrapper."""
    if not isinstance(model, DistributedDataParallel):
        return model
    inner: torch.nn.Module = model.module
    return inner


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Refuses locations that need a storage service."""
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgumentError(f"{text}: only local paths are available in this version")
    return pathlib.Path(text)


def dump_state_dict(instance: torch.nn.Module | torch.optim.Optimizer, path: pathlib.Path) -> None:
    """Writes `instance.state_dict()`, of a DDP model without the wrapper's key prefix."""
    holder = unwrap(instance) if isinstance(instance, torch.nn.Module) else instance
    _write(path, lambda file: torch.save(holder.state_dict(), file))


def dump_torchscript(model: torch.nn.Module, path: pathlib.Path) -> None:
    """Writes the model compiled by `torch.jit.script`. InvalidArgumentError: torch cannot compile it."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidTypeError(
            f"only a torch.nn.Module can be written as TorchScript, not {type(model).__name__}"
        )
    with warnings.catch_warnings():
        # Deprecated by torch, but what the published checkpoints hold and TorchServe reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            scripted = torch.jit.script(unwrap(model))
        except Exception as failure:  # torch raises many classes, most of them RuntimeError
            raise InvalidArgumentError(
                f"{path.name} was not written: torch.jit.script cannot compile "
                f"{type(unwrap(model)).__name__}; annotate forward(self, non_id_tensors: List[torch.Tensor], "
                f"embedding_tensors: List[torch.Tensor]), or leave with_jit_model out. It says: {failure}"
            ) from failure
        _write(path, lambda file: torch.jit.save(scripted, file))


def load_state_dict(
    instance: torch.nn.Module | torch.optim.Optimizer, path: pathlib.Path, map_location: Any = None
) -> None:
    """Reads what `dump_state_dict` wrote; drops a DDP prefix of the keys. Unpickles only tensors."""
    try:
        state = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise NotFoundError(
            f"{path} does not exist: check the checkpoint's directory and file name"
        ) from None
    if isinstance(instance, torch.nn.Module):
        instance = unwrap(instance)
        if state and all(key.startswith(_DDP_PREFIX) for key in state):
            state = {key.removeprefix(_DDP_PREFIX): value for key, value in state.items()}
    instance.load_state_dict(state)


def _write(path: pathlib.Path, save: Callable[[BinaryIO], None]) -> None:
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same directory, as a rename is atomic within a file system only.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            save(file)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
    except OSError as failure:
        raise StorageError(f"{path} could not be written: {failure}") from failure
    finally:
        if temporary is not None:
            pathlib.Path(temporary).unlink(missing_ok=True)
