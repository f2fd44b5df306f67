"""Which slots the rows of a checkpoint belong to, and whether a job with other slots can use them.

A row knows its sign only, and the top bits of a sign are its feature group's number. Were those numbers to
mean other slots now, rows would silently serve the wrong feature: that is what `changes_to` refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from persia.config import SlotsConfig
from persia.errors import FailedPreconditionError
from persia.validation import Count


@dataclass(frozen=True, kw_only=True)
class SlotRows:
    """The settings that decide which rows a slot uses."""

    dim: Count
    group: Count  # in the top bits of its signs
    hash_stack: tuple[Count, Count] | None = None  # (rounds, size of each)

    def __str__(self) -> str:
        stack = f", hash stack of {self.hash_stack[0]} x {self.hash_stack[1]}" if self.hash_stack else ""
        return f"dim {self.dim}, group {self.group}{stack}"


@dataclass(frozen=True)
class SchemaChanges:
    """Slots that a job has and a checkpoint has not, and the reverse."""

    added: tuple[str, ...]  # have no rows in the checkpoint
    removed: tuple[str, ...]  # have rows that the job never looks up

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)

    def __str__(self) -> str:
        parts = [
            f"{what} {', '.join(names)}"
            for what, names in (("added", self.added), ("removed", self.removed))
            if names
        ]
        return "slots " + " and ".join(parts)


@dataclass(frozen=True, kw_only=True)
class RowSchema:
    """The slots of a job, as far as its rows are concerned."""

    feature_index_prefix_bit: Annotated[int, Field(strict=True, ge=1, le=32)]
    slots: Mapping[str, SlotRows]

    @classmethod
    def of(cls, config: SlotsConfig) -> RowSchema:
        groups = config.group_numbers()
        slots = {}
        for name, slot in config.slots_config.items():
            stack = slot.hash_stack
            pair = None if stack is None else (stack.hash_stack_rounds, stack.embedding_size)
            slots[name] = SlotRows(dim=slot.dim, group=groups[name], hash_stack=pair)
        return cls(feature_index_prefix_bit=config.feature_index_prefix_bit, slots=slots)

    def changes_to(self, now: RowSchema) -> SchemaChanges:
        """What has changed since; FailedPreconditionError where rows would serve another slot than before."""
        if self.feature_index_prefix_bit != now.feature_index_prefix_bit:
            raise FailedPreconditionError(
                f"the checkpoint has feature_index_prefix_bit={self.feature_index_prefix_bit}, the job "
                f"{now.feature_index_prefix_bit}: its signs mean other IDs; use the checkpoint's value"
            )
        # Slots that have moved are errors, whatever the caller accepts: their rows would be another slot's.
        for name, before in self.slots.items():
            after = now.slots.get(name)
            if after is not None and after != before:
                raise FailedPreconditionError(
                    f"slot {name} had {before} in the checkpoint and has {after} now: keep what it had. "
                    "Groups are numbered in the order of the embedding config: add new slots at its end"
                )
        removed = tuple(name for name in self.slots if name not in now.slots)
        added = tuple(name for name in now.slots if name not in self.slots)
        self._check_reused_groups(now, removed, added)
        return SchemaChanges(added, removed)

    def _check_reused_groups(self, now: RowSchema, removed: tuple[str, ...], added: tuple[str, ...]) -> None:
        # A group number is in the sign of every row. A new slot with the number of a removed one would serve
        # that slot's rows, unless another slot still shares them.
        had = {self.slots[name].group: name for name in removed}
        still = {slot.group for slot in now.slots.values()} & {
            slot.group for name, slot in self.slots.items() if name in now.slots
        }
        for name in added:
            group = now.slots[name].group
            if group in had and group not in still:
                raise FailedPreconditionError(
                    f"slot {name} would take over the rows of slot {had[group]}, which had its group "
                    f"number {group} in the checkpoint: keep {had[group]} in the embedding config, and add "
                    f"{name} at its end"
                )
