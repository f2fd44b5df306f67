"""A job's checkpoint as one module of plain torch: its rows as tables, and its dense model behind them.

In: a checkpoint that has a signature, the job's slots, and the dense model. Out: an `ExportedJob`. Rows are
read twice, block by block, so that memory is bounded by the tables and one block.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia.config import SlotsConfig
from persia.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from persia.logger import get_logger
from persia.nn.exported import KeyedRows, exported_slots
from persia.nn.exported_features import ByName, ByPosition, ExportedFeature, ExportedFeatures, ExportedJob
from persia.rows.reader import RowReader
from persia.storage.dense import takes_names, unwrap
from persia.storage.dense_slots import DenseSlots
from persia.storage.schema import RowSchema
from persia.storage.signature import IdInput, Signature

if TYPE_CHECKING:
    from persia.ctx.embedding import EmbeddingCtx

_logger = get_logger(__name__)
_BYTES_OF_A_KEY = 8

_OnBytes = Callable[[int], None]
_Rows = tuple[NDArray[np.int64], NDArray[np.float32]]  # keys, and a row for each


def export_checkpoint(
    reader: RowReader,
    signature: Signature | None,
    slots: SlotsConfig,
    model: torch.nn.Module,
    *,
    max_bytes: int = 8 << 30,
    on_bytes: _OnBytes = lambda _: None,
) -> ExportedJob:
    """The rows that `reader` reads, behind `model`, in `eval()` mode and on the CPU.

    Args:
        signature: of the same checkpoint.
        slots: of the job that wrote it.
        model: the dense model with the weights of the checkpoint. It becomes part of the result.
        max_bytes: of rows and keys, at most.
        on_bytes: called with the size of every read; the rows are read twice.

    Raises:
        FailedPreconditionError: the checkpoint has no signature, or other slots than `slots`.
        ResourceExhaustedError: the rows take more than `max_bytes`.
    """
    if signature is None:
        raise FailedPreconditionError(
            f"{reader.location} does not name the features of its model: train a batch with this version of "
            "persia, and dump it again"
        )
    features = _features(reader, signature, slots)
    bits, dense = slots.feature_index_prefix_bit, DenseSlots.find(model)
    groups: dict[int, set[int]] = {}
    given: dict[int, list[_Rows]] = {}
    for name, feature in zip([feature.name for feature in signature.ids], features, strict=True):
        wanted = groups.setdefault(feature.slot.dim, set())
        if dense is None or name not in dense.tables:
            wanted.add(_group(feature.slot.prefix, bits))
            continue
        rows = dense.rows(name).detach().float().cpu().numpy()
        signs = np.arange(len(rows), dtype=np.int64) + feature.slot.prefix
        given.setdefault(feature.slot.dim, []).append((signs, rows))
    tables = _Tables(groups, bits, max_bytes).read(reader, given, on_bytes)
    caller: torch.nn.Module = ByPosition(model)
    if takes_names(model):
        caller = ByName(model, [f.name for f in signature.dense], [f.name for f in signature.ids])
    return ExportedJob(ExportedFeatures(tables, features, bits), caller).cpu().eval()


def export_context(ctx: EmbeddingCtx, directory: Any = None, *, max_bytes: int = 8 << 30) -> ExportedJob:
    """The rows and model of a context. See `persia.nn.export`."""
    if ctx.model is None:
        raise FailedPreconditionError("the context has no model: make it with model=...")
    slots = ctx.runtime.slots
    if slots is None:
        raise FailedPreconditionError(
            "the context does not know the job's slots: give it slots=..., or set PERSIA_EMBEDDING_CONFIG"
        )
    if ctx.runtime.signature is None:
        raise FailedPreconditionError(
            "the context does not name the features of its model: forward a batch first"
        )
    with tempfile.TemporaryDirectory(prefix="persia-export-") as own:
        directory = directory or own
        ctx.dump_embedding(directory, with_state=False)
        # Copied: the context may train on, and a model on a GPU must stay there.
        model = copy.deepcopy(unwrap(ctx.model)).cpu()
        return export_checkpoint(
            RowReader(directory), ctx.runtime.signature, slots, model, max_bytes=max_bytes
        )


class _Tables:
    """Tables of rows by dim."""

    def __init__(self, groups: dict[int, set[int]], prefix_bits: int, max_bytes: int) -> None:
        """`groups`: by dim, the feature groups whose rows are wanted."""
        self._groups = {dim: np.array(sorted(wanted), np.uint64) for dim, wanted in groups.items()}
        self._id_bits = np.uint64(64 - prefix_bits)
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def read(
        self, reader: RowReader, given: Mapping[int, list[_Rows]], on_bytes: _OnBytes
    ) -> dict[int, KeyedRows]:
        """Every wanted row once, its key first. `given`: those of the dense model, by dim."""
        signs = {dim: [keys for keys, _ in given.get(dim, ())] for dim in self._groups}
        for dim, blocks in given.items():
            self._take(sum(len(keys) for keys, _ in blocks), dim)
        for block in reader.blocks(on_bytes=on_bytes):
            if block.dim in signs:
                kept = block.signs[self._is_wanted(block.dim, block.signs)]
                self._take(len(kept), block.dim)
                signs[block.dim].append(kept.view(np.int64))
        tables = {}
        for dim in self._groups:
            keys = np.sort(np.concatenate([np.zeros(0, np.int64), *signs.pop(dim)]))
            # One row more: zeros, for keys that are missing.
            tables[dim] = KeyedRows(torch.from_numpy(keys), torch.zeros(len(keys) + 1, dim), is_padded=True)
            for its_keys, rows in given.get(dim, ()):
                tables[dim].rows.numpy()[np.searchsorted(keys, its_keys)] = rows
        for block in reader.blocks(on_bytes=on_bytes):
            if block.dim in tables:
                wanted = self._is_wanted(block.dim, block.signs)
                table = tables[block.dim]
                place = np.searchsorted(table.keys.numpy(), block.signs[wanted].view(np.int64))
                table.rows.numpy()[place] = block.embeddings[wanted]
        _logger.info("exported %s", ", ".join(f"{t.num_keys:,} rows of dim {d}" for d, t in tables.items()))
        return tables

    def _is_wanted(self, dim: int, signs: NDArray[np.uint64]) -> NDArray[np.bool_]:
        return np.isin(signs >> self._id_bits, self._groups[dim])

    def _take(self, num_rows: int, dim: int) -> None:
        self._num_bytes += num_rows * (4 * dim + _BYTES_OF_A_KEY)
        if self._num_bytes > self._max_bytes:
            raise ResourceExhaustedError(
                f"the export has more than {self._num_bytes:,} bytes, more than max_bytes={self._max_bytes:,}"
                ": raise it (--max-gib), or serve the rows from parameter servers"
            )


def _features(reader: RowReader, signature: Signature, slots: SlotsConfig) -> list[ExportedFeature]:
    known = exported_slots(slots)
    if missing := [feature.name for feature in signature.ids if feature.name not in known]:
        raise FailedPreconditionError(
            f"the model of {reader.location} takes {', '.join(missing)}, and the embedding config has no "
            "such slot: give that of the job that wrote the checkpoint"
        )
    if (schema := reader.section.schema) is not None:
        added = set(schema.changes_to(RowSchema.of(slots)).added)
        if without := [feature.name for feature in signature.ids if feature.name in added]:
            raise FailedPreconditionError(f"{reader.location} has no rows of slot {', '.join(without)}")
    features = []
    for feature in signature.ids:
        config = slots.slots_config[feature.name]
        num_fixed = 0 if config.embedding_summation else config.sample_fixed_size
        _check(feature, (num_fixed, config.dim + 1) if num_fixed else (config.dim,))
        features.append(
            ExportedFeature(known[feature.name], mean_scaling=config.mean_scaling, num_fixed=num_fixed)
        )
    return features


def _check(feature: IdInput, shape: tuple[int, ...]) -> None:
    if feature.shape != shape:
        raise FailedPreconditionError(
            f"the model was trained with embeddings {list(feature.shape)} of slot {feature.name}, and the "
            f"embedding config says {list(shape)}: give that of the job that wrote the checkpoint"
        )


def _group(prefix: int, prefix_bits: int) -> int:
    """The top bits of an int64 prefix, as a number without a sign."""
    return (prefix % (1 << 64)) >> (64 - prefix_bits)


def check_alone(**given: object) -> None:
    """InvalidArgumentError: arguments of `persia.nn.export` that a context does not take."""
    if names := [name for name, value in given.items() if value]:
        raise InvalidArgumentError(f"{', '.join(names)}: a context is exported whole; leave them out")
