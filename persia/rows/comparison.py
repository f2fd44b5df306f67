"""Compares two checkpoints slot by slot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import FailedPreconditionError
from persia.rows.reader import RowGroups, RowReader, Span

# Of both checkpoints together; decoded they take several times that.
_BYTES_AT_A_TIME = 256 << 20


@dataclass
class SlotChanges:
    """The rows of one slot (or of slots that share theirs) in two checkpoints. Norms are Euclidean."""

    num_before: int = 0
    num_after: int = 0
    num_added: int = 0
    num_removed: int = 0
    num_moved: int = 0  # in both, with different embeddings
    sum_move: float = 0.0
    max_move: float = 0.0
    sum_norm_before: float = 0.0
    sum_norm_after: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The sums as means."""
        values = {key: value for key, value in asdict(self).items() if not key.startswith("sum_")}
        values["mean_move"] = self.sum_move / max(1, self.num_moved)
        values["mean_norm_before"] = self.sum_norm_before / max(1, self.num_before)
        values["mean_norm_after"] = self.sum_norm_after / max(1, self.num_after)
        return values


@dataclass(frozen=True)
class _Table:
    """Rows of one dim, by sign."""

    signs: NDArray[np.uint64]
    embeddings: NDArray[np.float32]


def compare(
    before: RowReader, after: RowReader, on_bytes: Callable[[int], None] = lambda _: None
) -> dict[str, SlotChanges]:
    """Returns the changes by slot name. FailedPreconditionError: their signs do not mean the same IDs."""
    schemas = before.section.schema, after.section.schema
    if schemas[0] is not None and schemas[1] is not None:
        try:
            schemas[0].changes_to(schemas[1])
        except FailedPreconditionError as failure:
            raise FailedPreconditionError(f"the two cannot be compared: {failure}") from failure
    groups = RowGroups(schemas[1] or schemas[0])
    num_bytes = before.section.num_bytes + after.section.num_bytes
    changes: dict[str, SlotChanges] = defaultdict(SlotChanges)
    # Rows of one ID are in the same virtual shard of both, whatever the numbers of servers were.
    for span in Span.split(max(1, math.ceil(num_bytes / _BYTES_AT_A_TIME))):
        old, new = (_tables(reader, span, on_bytes) for reader in (before, after))
        for dim in sorted(old.keys() | new.keys()):
            _compare_tables(old.get(dim, _empty(dim)), new.get(dim, _empty(dim)), groups, changes)
    return dict(sorted(changes.items()))


def _tables(reader: RowReader, span: Span, on_bytes: Callable[[int], None]) -> dict[int, _Table]:
    parts: dict[int, list[_Table]] = defaultdict(list)
    for block in reader.blocks(span, on_bytes):
        parts[block.dim].append(_Table(block.signs, block.embeddings))
    joined = {}
    for dim, tables in parts.items():
        signs = np.concatenate([table.signs for table in tables])
        # Files have blocks in the order of their server: only sorted signs can be compared.
        order = np.argsort(signs)
        joined[dim] = _Table(signs[order], np.concatenate([table.embeddings for table in tables])[order])
    return joined


def _empty(dim: int) -> _Table:
    return _Table(np.zeros(0, np.uint64), np.zeros((0, dim), np.float32))


def _compare_tables(old: _Table, new: _Table, groups: RowGroups, changes: dict[str, SlotChanges]) -> None:
    _, in_old, in_new = np.intersect1d(old.signs, new.signs, assume_unique=True, return_indices=True)
    # In float64: squares of small differences underflow in float32, and the row would seem unmoved.
    moves = np.linalg.norm(
        new.embeddings[in_new].astype(np.float64) - old.embeddings[in_old].astype(np.float64), axis=1
    )
    for name, where in groups.split(old.signs):
        changes[name].num_before += len(where)
        changes[name].sum_norm_before += float(np.linalg.norm(old.embeddings[where], axis=1).sum(dtype=float))
    for name, where in groups.split(new.signs):
        changes[name].num_after += len(where)
        changes[name].sum_norm_after += float(np.linalg.norm(new.embeddings[where], axis=1).sum(dtype=float))
    for name, where in groups.split(np.delete(old.signs, in_old)):
        changes[name].num_removed += len(where)
    for name, where in groups.split(np.delete(new.signs, in_new)):
        changes[name].num_added += len(where)
    for name, where in groups.split(old.signs[in_old]):
        of_slot = moves[where]
        changes[name].num_moved += int(np.count_nonzero(of_slot))
        changes[name].sum_move += float(of_slot.sum())
        changes[name].max_move = max(changes[name].max_move, float(of_slot.max()))
