"""Rows must not serve another slot than the one that trained them."""

from __future__ import annotations

from typing import Any

import pytest

from persia.config import SlotsConfig, parse_embedding_config
from persia.errors import CorruptionError, FailedPreconditionError
from persia.storage.schema import RowSchema, SchemaChanges
from persia.validation import read_document, to_json


def schema(groups: dict[str, list[str]] | None = None, bits: int = 8, **dims: Any) -> RowSchema:
    slots = {name: dim if isinstance(dim, dict) else {"dim": dim} for name, dim in dims.items()}
    config: SlotsConfig = parse_embedding_config(
        {"feature_index_prefix_bit": bits, "slots_config": slots, "feature_groups": groups or {}}
    )
    return RowSchema.of(config)


OLD = schema(a=4, b=8)


def test_same_slots_have_not_changed() -> None:
    assert not OLD.changes_to(schema(a=4, b=8))
    # What the rows do not depend on may change.
    assert not OLD.changes_to(
        schema(a={"dim": 4, "sqrt_scaling": True}, b={"dim": 8, "sample_fixed_size": 3})
    )


def test_slots_added_and_removed_at_the_end_are_told() -> None:
    assert OLD.changes_to(schema(a=4, b=8, c=2, d=2)) == SchemaChanges(("c", "d"), ())
    changes = OLD.changes_to(schema(a=4))
    assert changes == SchemaChanges((), ("b",))
    assert str(changes) == "slots removed b"


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (schema(a=4, b=16), "slot b had dim 8, group 2 in the checkpoint and has dim 16, group 2"),
        (schema(b=8, a=4), "slot a had dim 4, group 1 .* has dim 4, group 2 now: .*add new slots at its end"),
        (schema(new=4, a=4, b=8), "slot a had dim 4, group 1 in the checkpoint and has dim 4, group 2"),
        (schema(bits=9, a=4, b=8), "feature_index_prefix_bit=8, the job 9"),
        (schema(a=4, c=8), "slot c would take over the rows of slot b"),
        (
            schema(a=4, b={"dim": 8, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 10}}),
            "dim 8, group 2, hash stack of 2 x 10 now",
        ),
    ],
)
def test_rows_of_another_slot_are_refused(now: RowSchema, message: str) -> None:
    with pytest.raises(FailedPreconditionError, match=message):
        OLD.changes_to(now)


def test_a_slot_may_join_a_group_that_others_keep() -> None:
    before = schema({"g": ["a", "b"]}, a=4, b=4)
    assert before.changes_to(schema({"g": ["a", "c"]}, a=4, c=4)) == SchemaChanges(("c",), ("b",))


def test_json_round_trip() -> None:
    stacked = schema(a=4, b={"dim": 8, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 10}})
    assert read_document(RowSchema, to_json(stacked), "x") == stacked


@pytest.mark.parametrize(
    "values",
    [
        None,
        {"slots": []},
        {"slots": {}, "feature_index_prefix_bit": 40},
        {"slots": {"a": 3}, "feature_index_prefix_bit": 8},
        {"slots": {"a": {"dim": -1, "group": 1}}, "feature_index_prefix_bit": 8},
        {"slots": {"a": {"dim": 4, "group": 1, "hash_stack": [1]}}, "feature_index_prefix_bit": 8},
    ],
)
def test_nonsense_is_corruption(values: object) -> None:
    with pytest.raises(CorruptionError, match="the file"):
        read_document(RowSchema, values, "the file")
