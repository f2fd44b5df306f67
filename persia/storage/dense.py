"""The torch part of a checkpoint: a model's or an optimizer's state, or TorchScript, as the bytes of a file.

Bytes first and files later: a dump encodes the state while training is paused, and writes it while training
continues.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from persia.errors import CorruptionError, InvalidArgumentError, InvalidTypeError


class StateHolder(Protocol):
    """An optimizer, or a part of its state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


TorchState = torch.nn.Module | StateHolder

_DDP_PREFIX = "module."
_COMPILED_PREFIX = "_orig_mod."  # of torch.compile(model), which wraps; model.compile() does not


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's model inside a DDP wrapper."""
    if not isinstance(model, DistributedDataParallel):
        return model
    inner: torch.nn.Module = model.module
    return inner


def innermost(model: torch.nn.Module) -> torch.nn.Module:
    """The user's model inside wrappers of DDP and `torch.compile`, in whatever order."""
    # A checkpoint may be loaded without the wrappers: its keys are those of the user's own model.
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or _is_compiled(inner):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    plain: torch.nn.Module = inner
    return plain


def _is_compiled(model: torch.nn.Module) -> bool:
    """Whether it is what `torch.compile(model)` returns."""
    # Its import takes seconds. A script with such a model has done it.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(model, compiler.OptimizedModule)


def takes_names(model: torch.nn.Module) -> bool:
    """Whether `forward` takes features by name: both of its arguments are annotated as dicts.

    TorchScript needs that annotation anyway. InvalidTypeError: one is a dict, the other is not.
    """
    inner = innermost(model)
    if isinstance(inner, torch.jit.ScriptModule):
        forward: Any = inner.forward
        arguments = forward.schema.arguments[1:3]
        are_dicts = {argument.type.kind() == "DictType" for argument in arguments}
    else:
        are_dicts = _dicts_of(type(inner).forward)
    if len(are_dicts) > 1:
        raise InvalidTypeError(
            f"{type(inner).__name__}.forward takes a dict and a list: annotate both arguments as "
            "Dict[str, torch.Tensor], or both as List[torch.Tensor]"
        )
    return are_dicts == {True}


@functools.lru_cache(maxsize=64)
def _dicts_of(forward: Callable[..., Any]) -> set[bool]:
    """Whether the arguments of `forward` are annotated as dicts. Cached: it is asked for each batch."""
    parameters = list(inspect.signature(forward).parameters.values())[1:3]
    # As text: an annotation may be a text itself, whose names are those of another module.
    texts = [inspect.formatannotation(p.annotation).strip("'\"") for p in parameters]
    return {re.match(r"(\w+\.)?[dD]ict\b", text) is not None for text in texts}


def named(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors for a model that takes names. InvalidArgumentError: a dict would lose all but one of a name."""
    found = dict(zip(names, tensors, strict=True))
    if len(found) < len(tensors):
        raise InvalidArgumentError(
            f"the model takes features by name, and these are not unique: {', '.join(names)}; name each "
            "NonIDTypeFeature"
        )
    return found


def state_bytes(instance: TorchState) -> bytes:
    """`instance.state_dict()` as `torch.save` writes it; keys have no prefixes of DDP and `torch.compile`."""
    holder = innermost(instance) if isinstance(instance, torch.nn.Module) else instance
    return _saved(holder.state_dict())


def _saved(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def extra_bytes(extra: object) -> bytes:
    """A script's own state. InvalidTypeError: it has objects that `load_extra` would refuse as code."""
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        load_extra(buffer.getvalue(), "extra")
    except (CorruptionError, pickle.PicklingError, AttributeError, TypeError) as failure:
        raise InvalidTypeError(
            f"extra cannot be stored safely ({failure}): use tensors, numbers, strings, bytes, None, and "
            "lists, tuples and dicts of them"
        ) from failure
    return buffer.getvalue()


def load_extra(content: bytes, what: str) -> Any:
    """The reverse of `extra_bytes`, on the CPU. CorruptionError, naming `what`: it is no such state."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as failure:
        raise CorruptionError(f"{what} is no state of a script: {failure}") from failure


def copied_state(model: torch.nn.Module) -> Callable[[], bytes]:
    """A copy of the state on the CPU, made at once; returns what makes `state_bytes` of it, on any thread."""
    state = {
        name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in innermost(model).state_dict().items()
    }
    return functools.partial(_saved, state)


def torchscript_bytes(model: torch.nn.Module, name: str) -> bytes:
    """The model compiled by `torch.jit.script`. InvalidArgumentError, naming the file: torch cannot."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidTypeError(
            f"only a torch.nn.Module can be written as TorchScript, not {type(model).__name__}"
        )
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Deprecated by torch, but what the published checkpoints hold and TorchServe reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            scripted = torch.jit.script(innermost(model))
        except Exception as failure:  # torch raises many classes, most of them RuntimeError
            raise InvalidArgumentError(
                f"{name} was not written: torch.jit.script cannot compile "
                f"{type(innermost(model)).__name__}; annotate "
                "forward(self, non_id_tensors: List[torch.Tensor], "
                f"embedding_tensors: List[torch.Tensor]), or leave with_jit_model out. It says: {failure}"
            ) from failure
        torch.jit.save(scripted, buffer)
    return buffer.getvalue()


def load_state(
    instance: TorchState,
    content: bytes,
    what: str,
    map_location: Any = None,
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> None:
    """Takes over what `state_bytes` wrote, or torch itself, whose keys then have prefixes. Unpickles only
    tensors. `adapt` makes the state of a model one that the model can take.

    CorruptionError, naming `what`: the bytes are no torch file. What the state does not fit raises torch's
    own error.
    """
    # weights_only: a checkpoint may come from anywhere, and a pickle can run code.
    try:
        state = torch.load(io.BytesIO(content), map_location=map_location, weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as failure:
        raise CorruptionError(f"{what} is no file of tensors by torch.save: {failure}") from failure
    if isinstance(instance, torch.nn.Module):
        instance = innermost(instance)
        state = adapt(_without_prefixes(state, instance.state_dict().keys()))
    instance.load_state_dict(state)


def _without_prefixes(state: dict[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """The state of the model inside wrappers, unless the model itself calls a part of it as wrappers do."""
    while state and not all(key in wanted for key in state):
        prefix = next(
            (p for p in (_DDP_PREFIX, _COMPILED_PREFIX) if all(k.startswith(p) for k in state)), None
        )
        if prefix is None:
            break
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


@contextlib.contextmanager
def undone_on_error(instances: Sequence[TorchState]) -> Iterator[None]:
    """After an error inside the block, `instances` are as they were before it."""
    # Copies: `state_dict` refers to the tensors that loading overwrites.
    before = [copy.deepcopy(instance.state_dict()) for instance in instances]
    try:
        yield
    except BaseException:
        for instance, state in zip(instances, before, strict=True):
            instance.load_state_dict(state)
        raise
