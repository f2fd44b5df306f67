"""An ordinary model's embeddings into persia's store, in place, with nothing else about it changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Optimizer
from persia.errors import InvalidArgumentError, InvalidTypeError
from persia.nn.embedding_bag_collection import check_optimizer, prefix_bits
from persia.nn.replicas import RankExchange, from_rank_0
from persia.nn.servers import Servers, ServerTable
from persia.nn.store_embedding import (
    PendingUpdates,
    StoreEmbedding,
    StoreEmbeddingBag,
    StoreModule,
    StoreRows,
)

Select = Callable[[str, nn.Module], bool]
_Original = nn.Embedding | nn.EmbeddingBag

# A converted model is to train like the original, whose rows nothing clamps.
_DEFAULT_CONFIG = EmbeddingConfig(weight_bound=0.0)


def convert(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    select: Select | None = None,
    grow: bool = False,
    embedding_config: EmbeddingConfig = _DEFAULT_CONFIG,
    capacity: int = 1_000_000_000,
    count_updates: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
    servers: Servers | None = None,
) -> nn.Module:
    """Puts the rows of `nn.Embedding` and `nn.EmbeddingBag` modules, anywhere in `model`, into a store.

    The modules are replaced in place; row i becomes the row of ID i. The training loop stays as it is, except
    that `loss.backward()` applies `optimizer` to the rows: they are no parameters any more, so make the dense
    optimizer and DDP from the converted model. A weight that is used twice, by one module or by several,
    stays one. Modules whose weight does not require a gradient are left as they are. The replaced weights
    are emptied, so that no other reference keeps their memory: `copy.deepcopy` the model first to keep it.

    Args:
        model: anything with embeddings, or an embedding itself.
        optimizer: of `persia.embedding.optim`.
        select: called with each embedding's qualified name and module; False leaves it alone. Default: all.
        grow: any 64-bit integer is an ID, and one without a row gets a fresh one in training. Otherwise IDs
            are those of the old vocabulary, and others are refused.
        embedding_config: initial values of fresh rows, admission, weight bound; the default clamps nothing.
        capacity: rows at most of each weight; beyond it those used the longest ago are evicted. Servers have
            one of their own.
        count_updates: of each row, for `export(min_updates=...)`; costs at most 16 bytes a row. Not with
            servers.
        process_group: its ranks train one model: rows begin as rank 0's and get the mean gradient of all
            ranks, as with DDP. Every rank must then call `backward()` equally often. Not with `admit_after`.
        servers: of `job_servers`. Rows are in the job's parameter servers, in slots named as the modules are;
            what the slots had before is overwritten. All models on them have one optimizer and one
            embedding_config, without `admit_after`. A lookup waits for its rows, and `backward()` until the
            gradients are applied; either raises where a server does not answer in `PERSIA_DEADLINE_SEC`.

    Returns:
        The model; a new module where `model` is an embedding itself.

    Raises:
        InvalidArgumentError: nothing to convert; or an embedding that a store cannot stand for, named with
            the reason; or servers without a slot for it, or with another optimizer for the rows of an
            earlier `convert`. The model is then as it was.
        InvalidTypeError: no module, or no optimizer of `persia.embedding.optim`.
    """
    chosen = _chosen(model, select)
    check_optimizer(optimizer)
    _check_counting(embedding_config, count_updates, process_group, servers)
    # Ranks make fresh rows by themselves: with one seed they make the same ones.
    exchange = None
    if process_group is not None:
        seed = torch.tensor([embedding_config.effective_seed], dtype=torch.uint64).view(torch.int64)
        seed_of_rank_0 = int(from_rank_0(seed, process_group).view(torch.uint64))
        embedding_config = replace(embedding_config, seed=seed_of_rank_0)
        exchange = RankExchange(process_group, in_servers=servers is not None)
    sizes = {"capacity": capacity, "count_updates": count_updates}
    rows_of = _make_rows(chosen, grow, servers, optimizer, embedding_config, PendingUpdates(exchange), sizes)
    return _replaced(model, chosen, rows_of, exchange)


def slots_for(model: nn.Module, *, select: Select | None = None) -> dict[str, Any]:
    """What `embedding_config.yml` must have for `convert(model, ..., select=select, servers=...)`.

    A slot for each weight, named as its first module. `persia.utils.dump_yaml(slots_for(model), path)` writes
    the file.

    Raises InvalidArgumentError and InvalidTypeError as `convert` does.
    """
    chosen = _chosen(model, select)
    slots = {name: {"dim": module.embedding_dim} for name, module in _weights(chosen).values()}
    return {"feature_index_prefix_bit": prefix_bits(len(slots)), "slots_config": slots}


def _check_counting(
    embedding_config: EmbeddingConfig,
    count_updates: bool,
    process_group: torch.distributed.ProcessGroup | None,
    servers: Servers | None,
) -> None:
    if count_updates and servers is not None:
        raise InvalidArgumentError("count_updates=True with servers, which do not count them: leave it out")
    if embedding_config.admit_after > 1 and (servers is not None or process_group is not None):
        raise InvalidArgumentError(
            f"embedding_config has admit_after={embedding_config.admit_after}, and an update with servers or "
            "process_group may look its IDs up once more, which would count: leave it out"
        )


def _make_rows(
    chosen: dict[str, _Original],
    grow: bool,
    servers: Servers | None,
    optimizer: Optimizer,
    embedding_config: EmbeddingConfig,
    updates: PendingUpdates,
    sizes: Mapping[str, Any],
) -> dict[int, StoreRows]:
    """The rows of each weight, by its identity."""
    weights = _weights(chosen)
    if servers is not None:
        # Asked before rows are made: a slot that is missing must not leave half of the model converted.
        servers.check({name: module.embedding_dim for name, module in weights.values()})
        servers.check_train_config(optimizer.train_config(embedding_config))
    return {
        weight: StoreRows(
            name,
            module.embedding_dim,
            None if grow else module.num_embeddings,
            optimizer,
            updates,
            embedding_config=embedding_config,
            engine=None if servers is None else ServerTable(servers, name, module.embedding_dim),
            **sizes,
        )
        for weight, (name, module) in weights.items()
    }


def _weights(chosen: dict[str, _Original]) -> dict[int, tuple[str, _Original]]:
    """By identity: the first module of each, and its name."""
    weights: dict[int, tuple[str, _Original]] = {}
    for name, module in chosen.items():
        # Tied modules have one weight, and must have one set of rows: the name of the first is the slot's.
        weights.setdefault(id(module.weight), (name or type(module).__name__, module))
    return weights


def _chosen(model: nn.Module, select: Select | None) -> dict[str, _Original]:
    """Checked, by qualified name. A table inside a larger module, as one of torchrec, is found, too."""
    # Before anything is changed: after an error the model is as it was, and no weight is emptied.
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is a {type(model).__name__}, must be a torch.nn.Module")
    # A frozen weight stays with torch: a store has the optimizer's state of each row.
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.requires_grad
    }
    chosen = {name: module for name, module in found.items() if select is None or select(name, module)}
    if not chosen:
        raise InvalidArgumentError(
            f"{type(model).__name__} has {len(found)} trainable nn.Embedding and nn.EmbeddingBag modules and "
            "none was chosen: there is nothing to convert"
        )
    for name, module in chosen.items():
        if reason := _reason_against(module):
            raise InvalidArgumentError(
                f"{name or type(module).__name__!r} {reason}, or leave it out by select="
            )
    _check_not_shared(model, chosen)
    return chosen


def _check_not_shared(model: nn.Module, chosen: dict[str, _Original]) -> None:
    weights = {id(module.weight) for module in chosen.values()}
    for parent_name, parent in model.named_modules():
        if any(parent is module for module in chosen.values()):
            continue
        # A weight that an output layer shares would no longer be the one that the store trains.
        for name, parameter in parent.named_parameters(recurse=False):
            if id(parameter) in weights:
                where = f"{parent_name}.{name}" if parent_name else name
                raise InvalidArgumentError(
                    f"the parameter {where!r} is the weight of a chosen embedding too, and would not see "
                    "what the store's rows learn: choose both by select=, or neither"
                )


def _reason_against(module: _Original) -> str | None:
    original = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    # A subclass may compute anything from its weight, which is empty after the conversion.
    if type(module).forward is not original.forward:
        return f"is a {type(module).__name__} with a forward of its own: replace it yourself"
    if parametrize.is_parametrized(module):
        return "is parametrized, and a store's rows are plain: remove the parametrization"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "has hooks, which would be lost: remove them first"
    if module.max_norm is not None:
        return (
            f"has max_norm={module.max_norm}, which rewrites rows whenever they are read, and a store's rows "
            "change in updates only: set max_norm=None, weight_bound bounds elements after an update"
        )
    if module.scale_grad_by_freq:
        return "has scale_grad_by_freq, which the store's optimizers do not know: set it to False"
    if isinstance(module, nn.EmbeddingBag) and module.mode not in ("sum", "mean"):
        return f"has mode={module.mode!r}, and a store pools by sum or mean: use one of these"
    if module.weight.dtype != torch.float32:
        return f"has a weight of {module.weight.dtype}, and a store's rows are float32: call .float() first"
    if module.weight.is_meta:
        return "is on the meta device and has no values: materialise it first"
    # The store refuses rows that are not finite, but only after the first blocks have been written.
    if not torch.isfinite(module.weight).all():
        return "has a NaN or an infinity in its weight: mend it"
    return None


def _replaced(
    model: nn.Module,
    chosen: Mapping[str, _Original],
    rows_of: Mapping[int, StoreRows],
    exchange: RankExchange | None,
) -> nn.Module:
    """Puts modules over `rows_of` in the place of those chosen, whose memory is given up."""
    replacements: dict[int, StoreModule] = {}  # by the module's identity
    for module in chosen.values():
        rows, padding_idx = rows_of[id(module.weight)], module.padding_idx
        new: StoreModule
        if isinstance(module, nn.Embedding):
            new = StoreEmbedding(rows, padding_idx)
        else:
            new = StoreEmbeddingBag(rows, module.mode, padding_idx, module.include_last_offset)
        # By identity: a module that is used in two places is replaced by one.
        replacements[id(module)] = new.to(module.weight.device).train(module.training)
    taken_over = [(replacements[id(module)], module.weight.detach()) for module in chosen.values()]
    if exchange is not None:
        exchange.load_weights(taken_over)
    else:
        for replacement, weight in taken_over:
            replacement.load_weight(weight)
    # An optimizer or a closure may still hold the parameter, which would keep the table in memory.
    for module in chosen.values():
        module.weight.data = module.weight.new_empty(0, module.embedding_dim)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in replacements:
                # Not by `setattr`: children of a ModuleDict may have names that are no attributes.
                parent._modules[name] = replacements[id(child)]
    return replacements.get(id(model), model)
