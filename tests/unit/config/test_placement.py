"""Which slots an embedding config places in the dense model."""

from __future__ import annotations

from typing import Any

import pytest

from persia.config import parse_embedding_config
from persia.errors import ConfigError


def test_the_threshold_places_what_it_can() -> None:
    settings: dict[str, Any] = {
        "small": {"dim": 2, "cardinality": 10},
        "large": {"dim": 2, "cardinality": 11},
        "unknown": {"dim": 2},
        "kept": {"dim": 2, "cardinality": 1, "placement": "servers"},
        "chosen": {"dim": 2, "cardinality": 1000, "placement": "dense"},
        "raw": {"dim": 2, "cardinality": 10, "embedding_summation": False},
        "slow": {"dim": 2, "cardinality": 10, "admit_after": 2},
        "one": {"dim": 2, "cardinality": 10},
        "other": {"dim": 2, "cardinality": 10},
    }
    slots: dict[str, Any] = {"slots_config": settings, "feature_groups": {"both": ["one", "other"]}}
    without = parse_embedding_config(slots)
    assert list(without.dense_slots) == ["chosen"]
    with_it = parse_embedding_config({**slots, "dense_placement_threshold": 10})
    assert list(with_it.dense_slots) == ["small", "chosen"]
    assert with_it.slot_modes == ("", "dense")
    assert without.schema_hash() != with_it.schema_hash()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs cardinality"),
        ({"cardinality": 2**24 + 1}, "cardinality of 16777217 is more than the 16777216"),
        ({"cardinality": 5, "embedding_summation": False}, "excludes embedding_summation=false"),
        ({"cardinality": 5, "admit_after": 2}, "excludes admit_after"),
        ({"cardinality": 5, "time_to_live_sec": 2.0}, "excludes time_to_live_sec"),
        ({"cardinality": 5, "optimizer": {"name": "sgd", "lr": 1.0}}, "excludes optimizer"),
        ({"cardinality": 5, "embedding_staleness": 2}, "excludes consistency 'hybrid 2'"),
        (
            {"cardinality": 5, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 9}},
            "excludes hash_stack_config",
        ),
    ],
    ids=str,
)
def test_what_excludes_a_slot_from_the_dense_model(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_embedding_config({"slots_config": {"a": {"dim": 2, "placement": "dense", **settings}}})


def test_slots_of_one_group_share_rows_on_servers() -> None:
    slots = {name: {"dim": 2, "cardinality": 5} for name in ("a", "b")}
    slots["b"]["placement"] = "dense"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="placement differ"):
        parse_embedding_config({"slots_config": slots, "feature_groups": {"both": ["a", "b"]}})
