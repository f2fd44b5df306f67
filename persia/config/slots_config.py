"""The embedding configuration: a job's slots (ID features), as the published `embedding_config.yml` has them.

Feature groups become numbers, which stand in the top `feature_index_prefix_bit` bits of every row's sign. Two
slots therefore share rows exactly when they are in one group.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import AliasChoices, BeforeValidator, Field

from persia.config.name_ranges import expanded_groups, expanded_keys
from persia.errors import ConfigError, PersiaError
from persia.validation import UINT32_MAX, UINT64_MAX, Positive, Positive32, Section, complaint

if TYPE_CHECKING:
    from persia import _native

# 64 bits: two configs do not share them by accident, and they fit into a message.
_SCHEMA_HASH_DIGITS = 16
MAX_SLOT_MODES = 32  # a lookup names slots by the bits of their modes
DENSE_MODE = "dense"  # the mode of slots in the dense model: workers look them up only to move their rows
MAX_DENSE_ROWS = 1 << 24  # of a slot in the dense model
MAX_ARRAY_ROWS = 1 << 31  # of all slots with an array
# Settings of rows on servers, which slots in the dense model cannot have.
_SERVER_SETTINGS = (
    *("optimizer", "admit_probability", "admit_after", "weight_bound"),
    *("time_to_live_sec", "min_norm", "capacity"),
)


class HashStackConfig(Section):
    """An ID stands for one row of each of `hash_stack_rounds` tables of `embedding_size` rows. 0 is off."""

    hash_stack_rounds: Annotated[int, Field(ge=0, le=UINT32_MAX)] = 0
    embedding_size: Annotated[int, Field(ge=0, le=UINT64_MAX)] = 0

    def check(self) -> None:
        if self.hash_stack_rounds > 0 and self.embedding_size == 0:
            raise ConfigError(
                f"embedding_size=0 must be at least 1 when hash_stack_rounds={self.hash_stack_rounds}"
            )


class RowSettings(Protocol):
    """An optimizer of `persia.embedding.optim` or an initializer of `persia.embedding.initializers`."""

    def settings(self) -> dict[str, Any]:
        """The mapping that a file would have: `name` and the settings' own names."""


def _plain_settings(value: Any) -> Any:
    """Objects as a file would have them."""
    if hasattr(value, "settings"):
        return value.settings()
    return dict(value) if isinstance(value, Mapping) else value


def _check_prefix(value: object) -> object:
    if value != 0 or isinstance(value, bool):
        raise complaint("must be 0: it is computed from feature_groups; leave it out")
    return value


if TYPE_CHECKING:
    _OwnSettings = Mapping[str, object] | RowSettings | None
else:
    _OwnSettings = Annotated[dict[str, object] | None, BeforeValidator(_plain_settings)]


class SlotConfig(Section):
    """One slot. Without `embedding_summation` it is a raw slot: its rows reach the model one by one.

    Those from `optimizer` on take the place of the job's own for the rows of this slot. `optimizer` and
    `initializer` are mappings as in the file, or objects of `persia.embedding.optim` and
    `persia.embedding.initializers`.
    """

    dim: Annotated[int, Field(ge=1, le=65536)]
    sample_fixed_size: Annotated[int, Field(ge=1, le=65535)] = 10  # raw slots: IDs that a sample keeps
    embedding_summation: bool = True
    sqrt_scaling: bool = False
    mean_scaling: bool = False
    hash_stack_config: HashStackConfig | None = None
    # A mode of its own; without, as the job: TrainCtx(consistency=), DataLoader(embedding_staleness=).
    consistency: Literal["hybrid", "synchronous", "asynchronous"] | None = None
    embedding_staleness: Positive32 | None = None  # batches in flight, of "hybrid"
    # "dense": the rows are parameters of the dense model; None: by `dense_placement_threshold`.
    placement: Literal["dense", "servers"] | None = None
    cardinality: Positive | None = None  # IDs of a slot in the dense model, or with an array, are below it
    # "array": an EmbeddingBagCollection with a store of its own keeps the rows in the order of their IDs.
    # Other jobs use the hash index, and do not check the bound.
    index: Literal["hash", "array"] | None = None
    index_prefix: Annotated[int, BeforeValidator(_check_prefix)] = 0
    optimizer: _OwnSettings = None
    initializer: _OwnSettings = None
    admit_probability: float | None = None
    admit_after: Annotated[int, Field(ge=1, le=255)] | None = None
    weight_bound: float | None = None
    time_to_live_sec: float | None = None  # 0: rows stay, whatever the job says
    min_norm: float | None = None
    capacity: Positive | None = None  # rows of its feature group on each server

    def check(self) -> None:
        self._check_pooling()
        self._check_consistency()
        self._check_rows()
        self._check_placement()
        self._check_index()

    def _check_index(self) -> None:
        if self.index != "array":
            return
        if self.cardinality is None:
            raise ConfigError("index='array' needs cardinality: the number of rows, above every ID")
        if self.cardinality > MAX_ARRAY_ROWS:
            raise ConfigError(
                f"index='array' with a cardinality of {self.cardinality} is more than the {MAX_ARRAY_ROWS} "
                "rows that an array can have: leave index out"
            )
        if self.hash_stack is not None:
            raise ConfigError(
                "index='array' excludes hash_stack_config, which is for IDs without a bound: leave one of "
                "them out"
            )

    @property
    def num_array_ids(self) -> int:
        """The IDs of a slot with an array; 0: it has none."""
        return (self.cardinality or 0) if self.index == "array" else 0

    def _check_placement(self) -> None:
        if self.placement != "dense":
            return
        if self.cardinality is None:
            raise ConfigError("placement='dense' needs cardinality: the number of rows, above every ID")
        if self.cardinality > MAX_DENSE_ROWS:
            raise ConfigError(
                f"placement='dense' with a cardinality of {self.cardinality} is more than the "
                f"{MAX_DENSE_ROWS} rows that each rank can have and send: choose placement: servers"
            )
        if (reason := self.not_dense) is not None:
            raise ConfigError(f"placement='dense' excludes {reason}: leave one of them out")

    @property
    def not_dense(self) -> str | None:
        """Which of its settings keeps the slot out of the dense model; None: it can be placed there."""
        if not self.embedding_summation:
            return "embedding_summation=false, as only pooled slots can be placed there"
        if self.hash_stack is not None:
            return "hash_stack_config, which is for IDs without a bound"
        if self.index == "array":
            return "index='array', as its rows are not in a store"
        if self.mode:
            return f"consistency {self.mode!r}, as the dense model is always synchronous"
        name = next((name for name in _SERVER_SETTINGS if getattr(self, name) is not None), None)
        return None if name is None else f"{name}, a setting of rows on parameter servers"

    @property
    def rows(self) -> dict[str, object]:
        """Row settings that this slot overrides."""
        # A new setting of rows is declared behind `optimizer`, and needs no second list here.
        names = list(SlotConfig.model_fields)
        names = names[names.index("optimizer") :]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _check_rows(self) -> None:
        if not self.rows:
            return
        from persia import _native  # knows every name and range

        try:
            # Built and dropped: the engine knows names and ranges of all row settings, so none is listed here
            # again.
            _native.SlotConfig(name="checked", dim=self.dim, rows=self.rows)
        except PersiaError as error:
            raise ConfigError(str(error)) from None

    @property
    def mode(self) -> str:
        """Its consistency mode: "synchronous", "asynchronous", "hybrid N"; "": the job's."""
        if self.embedding_staleness is not None:
            return f"hybrid {self.embedding_staleness}"
        return self.consistency or ""

    def _check_consistency(self) -> None:
        bound = self.embedding_staleness
        # Without a bound of its own the slot would not differ from a job that is hybrid.
        if self.consistency == "hybrid" and bound is None:
            raise ConfigError(
                "consistency='hybrid' needs embedding_staleness, the slot's own bound; leave it out for the "
                "job's"
            )
        if self.consistency in ("synchronous", "asynchronous") and bound is not None:
            raise ConfigError(
                f"embedding_staleness={bound} with consistency={self.consistency!r}: leave one of them out, "
                "or choose 'hybrid'"
            )

    def _check_pooling(self) -> None:
        if self.mean_scaling and self.sqrt_scaling:
            raise ConfigError("mean_scaling=true and sqrt_scaling=true exclude each other: keep one")
        if self.mean_scaling and not self.embedding_summation:
            raise ConfigError(
                "mean_scaling=true needs embedding_summation=true: the rows of a raw slot are not summed"
            )

    @property
    def scaling(self) -> str:
        """What a pooled slot's sum is divided by: "sqrt", "mean" or "" for nothing."""
        return "mean" if self.mean_scaling else "sqrt" if self.sqrt_scaling else ""

    @property
    def hash_stack(self) -> HashStackConfig | None:
        """The hash stack if it is on."""
        stack = self.hash_stack_config
        return stack if stack is not None and stack.hash_stack_rounds > 0 else None


class SlotsConfig(Section):
    """The whole of `embedding_config.yml`. `C{1..26}` in a name stands for the slots C1 to C26.

    A name that is written out takes precedence over a range; two ranges must not yield the same name.
    """

    feature_index_prefix_bit: Annotated[int, Field(ge=1, le=32)] = 8
    slots_config: Annotated[
        Mapping[str, SlotConfig],
        BeforeValidator(expanded_keys),
        Field(validation_alias=AliasChoices("slots_config", "slot_config")),
    ]
    feature_groups: Annotated[
        Mapping[str, Annotated[tuple[str, ...], Field(strict=False)]], BeforeValidator(expanded_groups)
    ] = {}  # pydantic copies it
    # Slots with a `cardinality` up to it are placed in the dense model, if nothing else in them forbids that.
    dense_placement_threshold: Annotated[Positive, Field(le=MAX_DENSE_ROWS)] | None = None

    def check(self) -> None:
        if not self.slots_config:
            raise ConfigError("slots_config has no slots: add at least one")
        if "" in self.slots_config:
            raise ConfigError("slots_config has a slot with an empty name: name every slot")
        # Groups first: what follows numbers them, and a slot in two groups has no number.
        self._check_groups()
        self._check_num_groups()
        self._check_num_modes()
        self._check_hash_stacks()

    def group_numbers(self) -> dict[str, int]:
        """Every slot's group: feature groups count from 1 on in their order, then each slot without one."""
        numbers = {
            slot: number
            for number, slots in enumerate(self.feature_groups.values(), start=1)
            for slot in slots
        }
        # A slot without a group is one by itself. Numbers follow the order of the file, so a checkpoint can
        # only be loaded with the order that its job had.
        next_number = len(self.feature_groups) + 1
        for slot in self.slots_config:
            if slot not in numbers:
                numbers[slot] = next_number
                next_number += 1
        return numbers

    @functools.cached_property
    def dense_slots(self) -> Mapping[str, SlotConfig]:
        """The slots that are placed in the dense model."""
        grouped = {name for slots in self.feature_groups.values() for name in slots if len(slots) > 1}
        limit = self.dense_placement_threshold or 0
        return {
            name: slot
            for name, slot in self.slots_config.items()
            if slot.placement == "dense"
            or (
                (slot.placement is None and slot.cardinality is not None and slot.cardinality <= limit)
                and slot.not_dense is None
                and name not in grouped
            )
        }

    def _mode_of(self, name: str) -> str:
        return DENSE_MODE if name in self.dense_slots else self.slots_config[name].mode

    @property
    def slot_modes(self) -> tuple[str, ...]:
        """The different modes of slots, "" (the job's) first. Slots of one are looked up together."""
        return tuple(sorted({self._mode_of(name) for name in self.slots_config}))

    def native_slots(self) -> list[_native.SlotConfig]:
        """The slots as the engine wants them, in the order of `slots_config`."""
        from persia import _native

        numbers, modes = self.group_numbers(), self.slot_modes
        return [
            _native.SlotConfig(
                name=name,
                dim=slot.dim,
                embedding_summation=slot.embedding_summation,
                sqrt_scaling=slot.sqrt_scaling,
                mean_scaling=slot.mean_scaling,
                sample_fixed_size=slot.sample_fixed_size,
                hash_stack_rounds=slot.hash_stack.hash_stack_rounds if slot.hash_stack else 0,
                hash_stack_size=slot.hash_stack.embedding_size if slot.hash_stack else 0,
                mode=modes.index(self._mode_of(name)),
                # Numbers begin with 1, as a prefix of 0 is no group; the engine counts its groups from 0.
                index_prefix=numbers[name] << (64 - self.feature_index_prefix_bit),
                group=numbers[name] - 1,
                num_array_ids=slot.num_array_ids,
                rows=slot.rows or None,
            )
            for name, slot in self.slots_config.items()
        ]

    def schema_hash(self) -> str:
        """16 hex digits, equal for two configs exactly when processes with them understand each other.

        The order of slots counts only where it numbers groups. What has no effect (the names of groups,
        `sample_fixed_size` of summed slots) does not count.
        """
        numbers = self.group_numbers()
        slots = {
            name: _schema_of(slot, numbers[name], self._mode_of(name))
            for name, slot in self.slots_config.items()
        }
        schema = {"feature_index_prefix_bit": self.feature_index_prefix_bit, "slots": slots}
        # Sorted keys and no spaces, so that equal schemas have equal bytes.
        canonical = json.dumps(schema, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:_SCHEMA_HASH_DIGITS]

    def _check_groups(self) -> None:
        # A slot has one prefix, so it can be in one group only.
        group_of: dict[str, str] = {}
        for group, slots in self.feature_groups.items():
            if not slots:
                raise ConfigError(f"feature_groups.{group} is empty: list its slots or remove it")
            for slot in slots:
                self._check_member(group, slot, first=slots[0])
                if slot in group_of:
                    where = "twice" if group_of[slot] == group else f"in {group_of[slot]} already"
                    raise ConfigError(
                        f"feature_groups.{group} has the slot {slot}, which is there {where}: keep one"
                    )
                group_of[slot] = group

    def _check_member(self, group: str, slot: str, *, first: str) -> None:
        if slot not in self.slots_config:
            raise ConfigError(
                f"feature_groups.{group} has the slot {slot}, which slots_config lacks: "
                "define it there, or remove it here"
            )
        # One group is one table on the servers: its rows have one size, one optimizer and one mode of lookup.
        one, other = self.slots_config[first], self.slots_config[slot]
        for what, differs in (
            (f"dim ({one.dim} and {other.dim})", one.dim != other.dim),
            ("optimizer, initializer, admission, eviction or weight bound", one.rows != other.rows),
            ("consistency or embedding_staleness", one.mode != other.mode),
            (
                f"arrays ({one.num_array_ids} and {other.num_array_ids} IDs)",
                one.num_array_ids != other.num_array_ids,
            ),
            ("placement", first != slot and "dense" in (one.placement, other.placement)),
        ):
            if differs:
                raise ConfigError(
                    f"feature_groups.{group} has {first} and {slot}, whose {what} differ: slots of one group "
                    "share rows, so give them the same or separate groups"
                )

    def _check_num_groups(self) -> None:
        num_groups = max(self.group_numbers().values())
        limit = 2**self.feature_index_prefix_bit - 1  # number 0 is no group
        if num_groups > limit:
            raise ConfigError(
                f"feature_index_prefix_bit={self.feature_index_prefix_bit} has room for {limit} groups, but "
                f"there are {num_groups} (a slot in no feature group is one by itself): "
                f"raise it to {num_groups.bit_length()}, or group slots"
            )

    def _check_num_modes(self) -> None:
        if len(self.slot_modes) > MAX_SLOT_MODES:
            raise ConfigError(
                f"slots_config has slots of {len(self.slot_modes)} different modes (consistency and "
                f"embedding_staleness), above {MAX_SLOT_MODES}: each is a lookup of its own; give slots the "
                "same bounds"
            )

    def _check_hash_stacks(self) -> None:
        # Each bucket is an ID of the slot and must stay below the prefix bits, or rows of another group would
        # be hit.
        num_ids = 2 ** (64 - self.feature_index_prefix_bit) - 1
        for name, slot in self.slots_config.items():
            stack = slot.hash_stack
            if stack is not None and stack.hash_stack_rounds * stack.embedding_size > num_ids:
                raise ConfigError(
                    f"slots_config.{name}.hash_stack_config has "
                    f"{stack.hash_stack_rounds} x {stack.embedding_size} rows, above the {num_ids} that "
                    f"feature_index_prefix_bit={self.feature_index_prefix_bit} leaves: make either smaller"
                )


def _schema_of(slot: SlotConfig, group_number: int, mode: str) -> dict[str, object]:
    stack = slot.hash_stack
    # Newer settings are included only where they are used, so that older configs keep their hashes.
    later: dict[str, object] = {"mean_scaling": True} if slot.mean_scaling else {}
    if mode:
        later["mode"] = mode
    if slot.rows:
        later["rows"] = slot.rows
    return {
        "dim": slot.dim,
        "group": group_number,
        "hash_stack": None if stack is None else [stack.hash_stack_rounds, stack.embedding_size],
        "raw": None if slot.embedding_summation else slot.sample_fixed_size,
        "sqrt_scaling": slot.sqrt_scaling,
        **later,
    }
