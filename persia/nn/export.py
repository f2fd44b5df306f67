"""A trained model as plain torch: its rows leave the store for tensors, and nothing of persia stays in it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from persia import _native
from persia.embedding.checks import checked_integer, checked_number
from persia.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    ResourceExhaustedError,
)
from persia.logger import get_logger
from persia.nn.embedding_bag_collection import EmbeddingBagCollection
from persia.nn.export_checkpoint import check_alone, export_context
from persia.nn.exported import (
    ExportedBagCollection,
    ExportedEmbedding,
    ExportedEmbeddingBag,
    ExportedSlot,
    KeyedRows,
    exported_slots,
)
from persia.nn.store_embedding import StoreEmbedding, StoreEmbeddingBag, StoreRows
from persia.rows.reader import snapshot_blocks

if TYPE_CHECKING:
    from persia.ctx import EmbeddingCtx

_logger = get_logger(__name__)

_BYTES_OF_A_KEY = 8
_PART_BYTES = 64 << 20  # read and decoded at a time


def export(
    model: nn.Module | EmbeddingCtx,
    *,
    ids: Mapping[str, torch.Tensor] | None = None,
    min_norm: float = 0.0,
    min_updates: int = 0,
    max_bytes: int = 8 << 30,
    directory: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """A copy of `model` in which tensors stand for stores.

    It goes where torch models go: state_dict, pickle, torch.export, TorchScript, ONNX. In `eval()` mode its
    outputs equal the trained model's to the last bit. It holds the rows that there are and reads zeros for
    other IDs; where a vocabulary is known and exported whole, IDs beyond it are an error, as they were. The
    size is logged before anything is built, and for each place what was left out.

    Of a context it exports the whole job: the result takes (dense, ids, lengths, weights=None), lists of
    tensors in the order of `ctx.runtime.signature`, and returns what the context's model returns. `dense` are
    [batch, ...] each, `ids` int64 [n], `lengths` int64 [batch], and `weights` float32 [n].

    Args:
        model: with converted modules or `EmbeddingBagCollection`s anywhere; a DDP wrapper is left out. Or a
            context that has a model and has forwarded a batch; it has none of the three choices below.
        ids: only the rows of these IDs, int64 or uint64 [n] each, by the place of the module: "deep.item" of
            a converted one, "embeddings.item" of slot "item" of a collection in `model.embeddings`, "item"
            where the collection is the model. Places that are not named are exported whole; an empty tensor
            leaves one out. A row that several slots share is there if any of them wants it.
        min_norm: rows whose Euclidean norm is below it are left out, and read as zeros.
        min_updates: so are rows with fewer updates, that is, batches with their ID whose gradient came back,
            since the row was made, set or loaded. Exact up to 2^32 - 1. The model must have been made with
            `count_updates=True`.
        max_bytes: of rows and keys, at most.
        directory: of a context, where its rows are dumped to be read from, which all parameter servers must
            reach; None: a temporary directory of this machine.

    Returns:
        The copy, in `eval()` mode. Its rows are buffers; an update of the model does not reach it.

    Raises:
        InvalidArgumentError: nothing to export, or `ids` for a place that is none.
        FailedPreconditionError: a context without a model, slots or a batch; `min_updates` where updates
            are not counted; rows of any IDs in servers without `ids`.
        InvalidTypeError: no module, or IDs of another dtype.
        ResourceExhaustedError: more than `max_bytes`; the message has the size.
    """
    # Late: contexts and this package are of one layer, and most scripts have only one of them.
    from persia.ctx import EmbeddingCtx

    if isinstance(model, EmbeddingCtx):
        check_alone(ids=ids, min_norm=min_norm, min_updates=min_updates)
        return export_context(model, directory, max_bytes=checked_integer("max_bytes", max_bytes))
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is a {type(model).__name__}, must be a torch.nn.Module or a context")
    if directory is not None:
        raise InvalidArgumentError(
            f"directory={directory!r} is for contexts, and {type(model).__name__} is none"
        )
    limit = _Limit(checked_integer("max_bytes", max_bytes))
    least = _Least(checked_number("min_norm", min_norm), checked_integer("min_updates", min_updates))
    return _export_module(model, dict(ids or {}), least, limit)


def _export_module(model: nn.Module, ids: dict[str, torch.Tensor], least: _Least, limit: _Limit) -> nn.Module:
    # The wrapper holds a process group, which cannot be copied and is of no use to the export.
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    exporter = _Exporter(_places(inner), ids, least, limit)
    # A copy in which the replacements stand for their originals wherever these are, references included.
    result: nn.Module = copy.deepcopy(inner, memo=exporter.replacements())
    return result.eval()


def _places(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (StoreEmbedding, StoreEmbeddingBag, EmbeddingBagCollection)
    # The rows of a converted module are a collection by themselves, and are exported in its place.
    places: dict[str, nn.Module] = {
        place: module
        for place, module in model.named_modules()
        if isinstance(module, kinds) and not isinstance(module, StoreRows)
    }
    if not places:
        raise InvalidArgumentError(
            f"{type(model).__name__} has no converted module and no EmbeddingBagCollection: there is nothing "
            "to export"
        )
    return places


@dataclass
class _Limit:
    """What has been taken so far, and how much may be."""

    max_bytes: int
    num_rows: int = 0
    num_bytes: int = 0

    def take(self, place: str, num_rows: int, num_bytes: int) -> None:
        self.num_rows += num_rows
        self.num_bytes += num_bytes
        # Checked as rows are read and not from the counts before: filters may leave most of them out.
        if self.num_bytes > self.max_bytes:
            raise ResourceExhaustedError(
                f"the export has {self.num_rows:,} rows and {self.num_bytes:,} bytes up to {place!r}, more "
                f"than max_bytes={self.max_bytes:,}: raise it, leave rows out by ids=, min_norm= or "
                "min_updates=, or serve them from parameter servers"
            )


@dataclass(frozen=True)
class _Least:
    """What rows must have not to be left out."""

    norm: float
    updates: int

    @property
    def is_any(self) -> bool:
        return not self.norm and self.updates <= 0

    def keep(
        self, collection: EmbeddingBagCollection, signs: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """bool [n]"""
        kept = torch.ones(len(signs), dtype=torch.bool)
        if self.norm:
            kept &= rows.norm(dim=1) >= self.norm
        if self.updates > 0:
            kept &= collection.num_updates(signs) >= self.updates
        return kept


class _Gathered:
    """Rows of one dim that are to be exported, and how many are not."""

    def __init__(self) -> None:
        self.signs: list[torch.Tensor] = []  # int64 [n] each
        self.rows: list[torch.Tensor] = []  # float32 [n, dim] each
        self.num_left_out = 0


class _Exporter:
    def __init__(
        self, places: dict[str, nn.Module], ids: dict[str, torch.Tensor], least: _Least, limit: _Limit
    ) -> None:
        self._places = places
        self._ids = {}
        for place, wanted in ids.items():
            is_ids = isinstance(wanted, torch.Tensor) and wanted.dtype in (torch.int64, torch.uint64)
            if not is_ids or wanted.dim() != 1:
                raise InvalidTypeError(f"ids[{place!r}] must be a torch.int64 or torch.uint64 tensor [n]")
            self._ids[place] = wanted.view(torch.int64).cpu()
        self._least = least
        self._limit = limit
        self._tables: dict[int, KeyedRows] = {}  # by the identity of the rows: what is tied stays tied
        self._check_ids()

    def replacements(self) -> dict[int, object]:
        """By the identity of what they replace."""
        return {id(module): self._replacement(place, module) for place, module in self._places.items()}

    def _replacement(self, place: str, module: nn.Module) -> nn.Module:
        if isinstance(module, StoreEmbedding):
            padding_row = None if module.padding_idx is None else module.padding_row
            return ExportedEmbedding(self._table(place, module.rows), module.padding_idx, padding_row)
        if isinstance(module, StoreEmbeddingBag):
            table = self._table(place, module.rows)
            return ExportedEmbeddingBag(table, module.mode, module.padding_idx, module.include_last_offset)
        assert isinstance(module, EmbeddingBagCollection)
        return self._collection(place, module)

    def _collection(self, place: str, module: EmbeddingBagCollection) -> ExportedBagCollection:
        slots = exported_slots(module.slots_config)
        wanted = {name: self._ids.get(_slot_place(place, name)) for name in slots}
        gathered = self._gather(place, module, slots, wanted)
        tables = {dim: KeyedRows(*_sorted(of_dim, dim)) for dim, of_dim in gathered.items()}
        return ExportedBagCollection(
            tables, list(slots.values()), module.slots_config.feature_index_prefix_bit
        )

    def _table(self, place: str, rows: StoreRows) -> KeyedRows:
        """Of converted modules: keys are IDs."""
        if id(rows) not in self._tables:
            self._tables[id(rows)] = self._read_table(place, rows)
        return self._tables[id(rows)]

    def _read_table(self, place: str, rows: StoreRows) -> KeyedRows:
        slots = exported_slots(rows.slots_config)
        (slot,) = slots.values()
        # Modules that are tied have one table: what any of them wants.
        tied = [name for name, module in self._places.items() if getattr(module, "rows", None) is rows]
        asked = [self._ids[name] for name in tied if name in self._ids]
        wanted = torch.cat(asked) if len(asked) == len(tied) else None
        gathered = self._gather(place, rows, slots, dict.fromkeys(slots, wanted))[slot.dim]
        keys, values = _sorted(gathered, slot.dim)
        # The module of a converted weight gets IDs, so its table needs no signs.
        keys -= slot.prefix
        # A whole vocabulary becomes a plain table, looked up by index: no search, and IDs beyond it are an
        # error.
        if rows.num_embeddings is None or wanted is not None or not self._least.is_any:
            return KeyedRows(keys, values, 64 - rows.slots_config.feature_index_prefix_bit)
        whole = torch.zeros(rows.num_embeddings, slot.dim)
        whole[keys] = values
        return KeyedRows(None, whole)

    def _gather(
        self,
        place: str,
        collection: EmbeddingBagCollection,
        slots: dict[str, ExportedSlot],
        wanted: dict[str, torch.Tensor | None],
    ) -> dict[int, _Gathered]:
        name = place or type(collection).__name__
        if self._least.updates > 0 and not collection.counts_updates:
            raise FailedPreconditionError(
                f"min_updates={self._least.updates}, and {name!r} does not count updates: make it with "
                "count_updates=True, before training, or choose by ids= or min_norm="
            )
        if isinstance(collection, StoreRows) and collection.in_servers:
            blocks = _rows_in_servers(place, collection, slots, wanted)
        else:
            blocks = _all_rows(name, collection)
        chosen = _Choice(slots, wanted, collection.slots_config.feature_index_prefix_bit)
        # By dim: slots of one dim share a table, as they may share rows.
        gathered = {slot.dim: _Gathered() for slot in slots.values()}
        for signs, rows in blocks:
            table = gathered[rows.shape[1]]
            keep = chosen(signs) & self._least.keep(collection, signs, rows)
            table.num_left_out += len(signs) - int(keep.sum())
            # Indexing copies: a view would keep all rows of the block in memory.
            table.signs.append(signs[keep])
            table.rows.append(rows[keep])
            num_kept = len(table.signs[-1])
            self._limit.take(place, num_kept, _bytes_of(num_kept, rows.shape[1]))
        _log_left_out(name, gathered)
        return gathered

    def _check_ids(self) -> None:
        known = []
        for place, module in self._places.items():
            if isinstance(module, EmbeddingBagCollection):
                known += [_slot_place(place, name) for name in module.slot_names]
            else:
                known.append(place)
        # A misspelt place would be exported whole, as one that was not named.
        if unknown := sorted(set(self._ids) - set(known)):
            raise InvalidArgumentError(
                f"ids has {unknown[0]!r}, which is no place of rows: they are {', '.join(known)}"
            )


_Blocks = Iterator[tuple[torch.Tensor, torch.Tensor]]  # signs int64 [n], rows float32 [n, dim]


def _all_rows(name: str, collection: EmbeddingBagCollection) -> _Blocks:
    """Every row once, in no order.

    Raises:
        FailedPreconditionError: a snapshot of the store is under way already.
        ResourceExhaustedError: other threads train faster than rows can be read.
    """
    stats = collection.stats()
    # Before anything is built: the log tells what was tried where the process ends for want of memory.
    dims = [slot.dim for slot in collection.slots_config.slots_config.values()]
    bound = _bytes_of(stats.num_rows, max(dims))
    _logger.info("exporting %r: %s rows, at most %s bytes", name, f"{stats.num_rows:,}", f"{bound:,}")
    # Each part is decoded as a whole; their size bounds the memory beside the result.
    num_parts = max(1, stats.memory_bytes // _PART_BYTES)
    snapshot = collection._own_store().begin_snapshot(num_parts)
    try:
        for index in range(num_parts):
            by_dim: dict[int, list[_native.BlockRows]] = {}
            for block in _native.decode_checkpoint_blocks(snapshot_blocks(snapshot.part(index))):
                by_dim.setdefault(block.dim, []).append(block)
            # Blocks are small, one for each dim and virtual shard: joined, they cost one tensor operation a
            # part.
            for blocks in by_dim.values():
                signs = np.concatenate([block.signs for block in blocks]).view(np.int64)
                rows = np.concatenate([block.embeddings for block in blocks])
                yield torch.from_numpy(signs), torch.from_numpy(rows)
    finally:
        snapshot.close()


def _rows_in_servers(
    place: str,
    rows: StoreRows,
    slots: dict[str, ExportedSlot],
    wanted: dict[str, torch.Tensor | None],
) -> _Blocks:
    """Servers are asked for IDs; what reads as zeros is left out, which changes no output."""
    ((name, slot),) = slots.items()
    ids = wanted[name]
    if ids is None and rows.num_embeddings is None:
        raise FailedPreconditionError(
            f"{place!r} has rows of any IDs, and servers do not list them: name those to export by ids=, "
            "or dump a checkpoint and read it (docs/checkpoints.md)"
        )
    known = torch.arange(rows.num_embeddings or 0) if ids is None else ids
    # Each once: keys of a table must differ, and several modules may have named the same ID.
    for block in rows.id_blocks(torch.unique(known)):
        values = rows.read(block)
        is_there = values.any(1)
        signs = slot.signs(block, 64 - rows.slots_config.feature_index_prefix_bit)
        yield signs[is_there], values[is_there]


class _Choice:
    """Which signs are wanted."""

    def __init__(
        self, slots: dict[str, ExportedSlot], wanted: dict[str, torch.Tensor | None], prefix_bits: int
    ) -> None:
        self._id_bits = 64 - prefix_bits
        self._whole = torch.tensor(
            [slots[name].prefix for name, ids in wanted.items() if ids is None], dtype=torch.int64
        )
        parts = [slots[name].signs(ids, self._id_bits) for name, ids in wanted.items() if ids is not None]
        self._signs = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *parts]))

    def __call__(self, signs: torch.Tensor) -> torch.Tensor:
        """bool [n]"""
        # An arithmetic shift: a prefix with the top bit set is negative in int64, as in `exported_slots`.
        prefixes = (signs >> self._id_bits) << self._id_bits
        return torch.isin(prefixes, self._whole) | torch.isin(signs, self._signs)


def _log_left_out(place: str, gathered: Mapping[int, _Gathered]) -> None:
    kept = {dim: sum(map(len, of_dim.signs)) for dim, of_dim in gathered.items()}
    _logger.info(
        "exported %r: %s rows, %s bytes; left out %s rows, %s bytes",
        place,
        f"{sum(kept.values()):,}",
        f"{sum(_bytes_of(count, dim) for dim, count in kept.items()):,}",
        f"{sum(of_dim.num_left_out for of_dim in gathered.values()):,}",
        f"{sum(_bytes_of(of_dim.num_left_out, dim) for dim, of_dim in gathered.items()):,}",
    )


def _bytes_of(num_rows: int, dim: int) -> int:
    return num_rows * (4 * dim + _BYTES_OF_A_KEY)


def _slot_place(place: str, slot: str) -> str:
    return f"{place}.{slot}" if place else slot


def _sorted(gathered: _Gathered, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ascending, and their rows."""
    signs = torch.cat([torch.empty(0, dtype=torch.int64), *gathered.signs])
    rows = torch.cat([torch.empty(0, dim), *gathered.rows])
    keys, order = torch.sort(signs)
    return keys, rows[order]
