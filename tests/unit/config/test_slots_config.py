"""Every key of the embedding config, how groups are numbered, and what the schema hash tells apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import _native
from persia.config import HashStackConfig, SlotConfig, SlotsConfig, parse_embedding_config
from persia.embedding.initializers import XavierUniform
from persia.embedding.optim import Adam
from persia.errors import ConfigError

SLOT_DEFAULTS = {
    "sample_fixed_size": 10,
    "embedding_summation": True,
    "sqrt_scaling": False,
    "mean_scaling": False,
    "hash_stack_config": None,
    "index_prefix": 0,
}

SLOT_LIMITS = {"dim": (1, 65536), "sample_fixed_size": (1, 65535)}


def slot(**keys: object) -> dict[str, Any]:
    """A config with one slot named user."""
    return {"slots_config": {"user": {"dim": 8, **keys}}}


def slots(*names: str, bits: int = 8, groups: dict[str, list[str]] | None = None) -> SlotsConfig:
    """A config with slots of dim 8."""
    return parse_embedding_config(
        {
            "feature_index_prefix_bit": bits,
            "slots_config": {name: {"dim": 8} for name in names},
            "feature_groups": groups or {},
        }
    )


def refusal_of(mapping: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_embedding_config(mapping, source="slots.yml")  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith("slots.yml: ")
    assert "\n" not in message
    return message.removeprefix("slots.yml: ")


@pytest.mark.parametrize("name", SLOT_DEFAULTS)
def test_every_key_of_a_slot_but_dim_has_a_default(name):
    config = parse_embedding_config(slot())
    assert getattr(config.slots_config["user"], name) == SLOT_DEFAULTS[name]


def test_the_other_keys_have_defaults():
    config = parse_embedding_config(slot())
    assert config.feature_index_prefix_bit == 8
    assert config.feature_groups == {}
    assert HashStackConfig() == HashStackConfig(hash_stack_rounds=0, embedding_size=0)
    assert config == SlotsConfig(slots_config={"user": SlotConfig(dim=8)})


@pytest.mark.parametrize("name", SLOT_LIMITS)
def test_numbers_of_a_slot_are_taken_up_to_their_limits_and_not_beyond(name):
    least, largest = SLOT_LIMITS[name]
    for value in (least, largest):
        assert getattr(parse_embedding_config(slot(**{name: value})).slots_config["user"], name) == value
    for value, bound in ((least - 1, f"at least {least}"), (largest + 1, f"at most {largest}")):
        assert refusal_of(slot(**{name: value})) == f"slots_config.user.{name}={value} must be {bound}"


@pytest.mark.parametrize("bits", [1, 32])
def test_prefix_bits_are_taken_up_to_their_limits(bits):
    assert (
        parse_embedding_config({"feature_index_prefix_bit": bits, **slot()}).feature_index_prefix_bit == bits
    )


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "slots_config is missing: it has no default, so add it"),
        ({"slots_config": {}}, "slots_config has no slots: add at least one"),
        ({"slots_config": None}, "slots_config is empty"),
        ({"slots_config": ["user"]}, "slots_config must be a mapping of keys to values, not ['user']"),
        ({"slots_config": {"user": 8}}, "slots_config.user must be a mapping of keys to values, not 8"),
        ({"slots_config": {"user": {}}}, "slots_config.user.dim is missing"),
        (
            {"slots_config": {"user": {"dimm": 8}}},
            "slots_config.user.dimm=8 is not a known key: did you mean 'dim'?",
        ),
        ({"slots_config": {"": {"dim": 8}}}, "slots_config has a slot with an empty name"),
        (
            {"slots_config": {True: {"dim": 8}}},
            "slots_config has the name true, which must be a valid string: quote it",
        ),
        (
            {"slots_config": {7: {"dim": 8}}},
            "slots_config has the name 7, which must be a valid string: quote it",
        ),
        (slot(dim=True), "slots_config.user.dim=true must be a valid integer"),
        (slot(dim=8.0), "slots_config.user.dim=8.0 must be a valid integer"),
        (slot(sample_fixed_size="10"), "slots_config.user.sample_fixed_size='10' must be a valid integer"),
        (slot(embedding_summation=1), "slots_config.user.embedding_summation=1 must be a valid boolean"),
        (
            slot(sqrt_scaling=True, mean_scaling=True),
            "slots_config.user.mean_scaling=true and sqrt_scaling=true exclude each other",
        ),
        (
            slot(mean_scaling=True, embedding_summation=False),
            "slots_config.user.mean_scaling=true needs embedding_summation=true",
        ),
        (slot(sqrt_scaling="no"), "slots_config.user.sqrt_scaling='no' must be a valid boolean"),
        (
            slot(index_prefix=1),
            "slots_config.user.index_prefix=1 must be 0: it is computed from feature_groups",
        ),
        (slot(index_prefix=False), "slots_config.user.index_prefix=false must be 0"),
        (slot(hash_stack_config=3), "slots_config.user.hash_stack_config must be a mapping"),
        (
            {"feature_index_prefix_bit": 0, **slot()},
            "feature_index_prefix_bit=0 must be at least 1",
        ),
        (
            {"feature_index_prefix_bit": 33, **slot()},
            "feature_index_prefix_bit=33 must be at most 32",
        ),
        ({"feature_index_prefix_bit": "8", **slot()}, "feature_index_prefix_bit='8' must be a valid integer"),
        ({"feature_groups": ["user"], **slot()}, "feature_groups must be a mapping"),
        ({"feature_groups": {"g": "user"}, **slot()}, "feature_groups.g='user' must be a valid list"),
        (
            {"feature_groups": {"g": [True]}, **slot()},
            "feature_groups.g.0=true must be a valid string: quote it",
        ),
        (
            {"feature_group": {}, **slot()},
            "feature_group={} is not a known key: did you mean 'feature_groups'?",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_key_and_value(mapping, message):
    assert refusal_of(mapping).startswith(message)


def test_slots_have_two_spellings_of_which_one_may_be_used():
    assert parse_embedding_config({"slot_config": slot()["slots_config"]}) == parse_embedding_config(slot())
    both = {"slot_config": slot()["slots_config"], **slot()}
    assert refusal_of(both) == "slots_config is also given as slot_config, another spelling of it: keep one"


class TestHashStack:
    def test_reaches_the_slot(self):
        stack = {"hash_stack_rounds": 2, "embedding_size": 10}
        config = parse_embedding_config(slot(hash_stack_config=stack)).slots_config["user"]
        assert config.hash_stack == HashStackConfig(hash_stack_rounds=2, embedding_size=10)

    @pytest.mark.parametrize("stack", [None, {}, {"hash_stack_rounds": 0, "embedding_size": 10}])
    def test_no_rounds_mean_none(self, stack):
        assert parse_embedding_config(slot(hash_stack_config=stack)).slots_config["user"].hash_stack is None

    @pytest.mark.parametrize("name", ["hash_stack_rounds", "embedding_size"])
    @pytest.mark.parametrize("value", [-1, 2**64, True, 1.0, "2", None])
    def test_wrong_values_are_refused(self, name, value):
        message = refusal_of(slot(hash_stack_config={name: value}))
        assert message.startswith(f"slots_config.user.hash_stack_config.{name}=")

    def test_rounds_need_a_size(self):
        message = refusal_of(slot(hash_stack_config={"hash_stack_rounds": 2}))
        assert message.startswith("slots_config.user.hash_stack_config.embedding_size=0 must be at least 1")

    def test_its_rows_must_fit_beside_the_prefix(self):
        largest = 2**32 - 1
        fits = slot(hash_stack_config={"hash_stack_rounds": 1, "embedding_size": largest})
        parse_embedding_config({"feature_index_prefix_bit": 32, **fits})
        wide = slot(hash_stack_config={"hash_stack_rounds": 1, "embedding_size": largest + 1})
        message = refusal_of({"feature_index_prefix_bit": 32, **wide})
        assert f"1 x {largest + 1} rows, above the {largest}" in message


class TestGroups:
    def test_feature_groups_come_first_then_each_slot_alone(self):
        config = slots("a", "b", "c", "d", "e", groups={"z": ["d", "b"], "y": ["e"]})
        assert config.group_numbers() == {"d": 1, "b": 1, "e": 2, "a": 3, "c": 4}

    def test_a_group_may_have_the_name_of_a_slot_outside(self):
        assert slots("a", "b", groups={"a": ["b"]}).group_numbers() == {"b": 1, "a": 2}

    @pytest.mark.parametrize("bits", [1, 2, 8])
    def test_one_number_is_no_group(self, bits):
        limit = 2**bits - 1
        names = [f"slot{i}" for i in range(limit + 1)]
        assert max(slots(*names[:limit], bits=bits).group_numbers().values()) == limit
        assert max(slots(*names, bits=bits, groups={"g": names[:2]}).group_numbers().values()) == limit
        with pytest.raises(ConfigError) as caught:
            slots(*names, bits=bits)
        message = str(caught.value)
        assert (
            f"feature_index_prefix_bit={bits} has room for {limit} groups, but there are {limit + 1}"
            in message
        )
        assert f"raise it to {bits + 1}" in message
        slots(*names, bits=bits + 1)

    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            ({"g": ["a", "x"]}, "feature_groups.g has the slot x, which slots_config lacks"),
            ({"g": ["a"], "h": ["b", "a"]}, "feature_groups.h has the slot a, which is there in g already"),
            ({"g": ["a", "a"]}, "feature_groups.g has the slot a, which is there twice"),
            ({"g": []}, "feature_groups.g is empty"),
        ],
    )
    def test_groups_that_make_no_sense_are_refused(self, groups, message):
        with pytest.raises(ConfigError, match=message):
            slots("a", "b", groups=groups)

    def test_slots_of_one_group_must_have_one_dim(self):
        mapping = {"slots_config": {"a": {"dim": 8}, "b": {"dim": 16}}, "feature_groups": {"g": ["a", "b"]}}
        assert refusal_of(mapping).startswith("feature_groups.g has a and b, whose dim (8 and 16) differ")


class TestRowsOfASlot:
    def test_objects_and_mappings_mean_the_same(self):
        given = SlotConfig(dim=8, optimizer=Adam(lr=0.5), initializer=XavierUniform(gain=2))
        adam = {"name": "adam", "lr": 0.5, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
        xavier = {"name": "xavier_uniform", "gain": 2}
        assert given == SlotConfig(dim=8, optimizer=adam, initializer=xavier)
        assert given == parse_embedding_config(slot(optimizer=adam, initializer=xavier)).slots_config["user"]
        assert given.rows == {"optimizer": adam, "initializer": xavier}
        assert SlotConfig(dim=8).rows == {}

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"optimizer": "adam"}, "optimizer must be a mapping of keys to values, not 'adam'"),
            ({"optimizer": {"lr": 0.1}}, "optimizer has no name"),
            ({"optimizer": {"name": "adam"}}, "optimizer adam has no lr"),
            ({"optimizer": {"name": "tiger", "lr": 0.1}}, "'tiger' is not one of sgd, adagrad"),
            ({"optimizer": {"name": "adam", "lr": 0.1, "betas": 0.9}}, "betas is no hyper-parameter of adam"),
            ({"optimizer": {"name": "adam", "lr": "1e-3"}}, "lr='1e-3' is no number"),
            ({"optimizer": {"name": "adam", "lr": -1}}, "lr is -1"),
            ({"optimizer": {"name": "sgd", "lr": 0.1, "nesterov": True}}, "nesterov needs a momentum"),
            ({"initializer": {"name": "normal", "sigma": 1}}, "known are: mean, std"),
            ({"initializer": {"name": "uniform", "lower": 2}}, "initializer.upper is 0.01"),
            ({"admit_probability": 1.5}, "admit_probability is 1.5"),
            ({"admit_probability": "high"}, "admit_probability='high' must be a valid number"),
            ({"admit_after": 0}, "admit_after=0 must be at least 1"),
            ({"weight_bound": -1}, "weight_bound is -1"),
            ({"weight_bound": True}, "weight_bound=true must be a valid number"),
            ({"time_to_live_sec": -1}, "time_to_live_sec is -1"),
            ({"time_to_live_sec": "1 day"}, "time_to_live_sec='1 day' must be a valid number"),
            ({"min_norm": -0.5}, "min_norm is -0.5"),
            ({"capacity": 0}, "capacity=0 must be at least 1"),
        ],
    )
    def test_what_cannot_be_is_refused_by_name(self, settings, message):
        refusal = refusal_of(slot(**settings))
        assert message in refusal
        assert refusal.startswith("slots_config.user.")

    def test_slots_of_one_group_must_have_the_same(self):
        own = {"weight_bound": 1}
        mapping = {
            "slots_config": {"a": {"dim": 8}, "b": {"dim": 8, **own}},
            "feature_groups": {"g": ["a", "b"]},
        }
        assert "feature_groups.g has a and b, whose optimizer" in refusal_of(mapping)
        mapping["slots_config"]["a"].update(own)
        assert len(parse_embedding_config(mapping).native_slots()) == 2

    def test_they_count_in_the_schema(self):
        hashes = {
            parse_embedding_config(mapping).schema_hash()
            for mapping in (slot(), slot(admit_after=2), slot(initializer={"name": "ones"}))
        }
        assert len(hashes) == 3


class RecordedSlot:
    """Takes the place of the native class, whose settings cannot be read back."""

    def __init__(self, **settings: object) -> None:
        self.settings = settings


class TestNativeSlots:
    def test_every_setting_arrives(self, monkeypatch):
        monkeypatch.setattr(_native, "SlotConfig", RecordedSlot)
        own_rows = {"optimizer": {"name": "sgd", "lr": 0.1}, "admit_after": 2}
        mapping = {
            "feature_index_prefix_bit": 12,
            "slots_config": {
                "plain": {"dim": 8},
                "raw": {
                    "dim": 4,
                    "embedding_summation": False,
                    "sample_fixed_size": 3,
                    "sqrt_scaling": True,
                    **own_rows,
                },
                "mean": {"dim": 8, "mean_scaling": True},
                "stacked": {"dim": 8, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 10}},
            },
            "feature_groups": {"g": ["stacked", "plain"]},
        }
        natives = parse_embedding_config(mapping).native_slots()
        plain, raw, mean, stacked = (native.settings for native in natives)
        pooled = {"embedding_summation": True, "sqrt_scaling": False, "sample_fixed_size": 10}
        pooled |= {"mean_scaling": False, "mode": 0, "num_array_ids": 0}
        first_group = {"index_prefix": 1 << 52, "group": 0}
        no_stack = {"hash_stack_rounds": 0, "hash_stack_size": 0, "rows": None}
        assert plain == {"name": "plain", "dim": 8, **pooled, **first_group, **no_stack}
        stack = {"hash_stack_rounds": 2, "hash_stack_size": 10, "rows": None}
        assert stacked == {"name": "stacked", "dim": 8, **pooled, **first_group, **stack}
        own = {
            "name": "raw",
            "dim": 4,
            "embedding_summation": False,
            "sqrt_scaling": True,
            "mean_scaling": False,
            "sample_fixed_size": 3,
            "mode": 0,
            "num_array_ids": 0,
        }
        second_group = {"index_prefix": 3 << 52, "group": 2}
        assert mean == {"name": "mean", "dim": 8, **pooled, "mean_scaling": True, **second_group, **no_stack}
        assert raw == {**own, "index_prefix": 2 << 52, "group": 1, **no_stack, "rows": own_rows}

    @pytest.mark.parametrize("bits", [1, 8, 32])
    def test_the_engine_takes_the_largest_config_that_is_valid_here(self, bits):
        config = parse_embedding_config(
            {
                "feature_index_prefix_bit": bits,
                "slots_config": {
                    "a": {"dim": 65536, "embedding_summation": False, "sample_fixed_size": 65535},
                    "b": {
                        "dim": 65536,
                        "hash_stack_config": {"hash_stack_rounds": 1, "embedding_size": 2 ** (64 - bits) - 1},
                    },
                },
                "feature_groups": {"g": ["a", "b"]},
            }
        )
        native = config.native_slots()
        assert [slot.name for slot in native] == ["a", "b"]
        _native.EmbeddedClient(slots=native, feature_index_prefix_bit=bits, capacity=16)

    def test_the_engine_takes_as_many_groups_as_fit(self):
        config = slots(*(f"slot{i}" for i in range(255)))
        _native.EmbeddedClient(slots=config.native_slots(), feature_index_prefix_bit=8, capacity=16)


class TestSchemaHash:
    # Servers of one job may run different versions: a changed hash parts them.
    def test_is_the_same_in_every_version(self):
        config = slots("a", "b", "c", groups={"g": ["c", "a"]})
        assert config.schema_hash() == "007a0b36bbabb74a"

    @pytest.mark.parametrize(
        "other",
        [
            slots("c", "a", "b", groups={"g": ["c", "a"]}),  # b stays the only slot outside
            slots("a", "b", "c", groups={"other": ["a", "c"]}),
        ],
        ids=["order of slots", "order and name of a group"],
    )
    def test_does_not_tell_apart_what_means_the_same(self, other):
        assert other.schema_hash() == slots("a", "b", "c", groups={"g": ["c", "a"]}).schema_hash()

    @pytest.mark.parametrize(
        "same",
        [
            slot(sample_fixed_size=20),
            slot(hash_stack_config={"embedding_size": 10}),
            slot(embedding_summation=True),
        ],
    )
    def test_does_not_depend_on_settings_without_effect(self, same):
        assert parse_embedding_config(same).schema_hash() == parse_embedding_config(slot()).schema_hash()

    def test_tells_apart_what_differs(self):
        raw = {"embedding_summation": False}
        stack = {"hash_stack_rounds": 2, "embedding_size": 10}
        configs = [
            parse_embedding_config(mapping)
            for mapping in (
                slot(),
                slot(dim=16),
                slot(sqrt_scaling=True),
                slot(mean_scaling=True),
                slot(**raw),
                slot(**raw, sample_fixed_size=20),
                slot(hash_stack_config=stack),
                slot(hash_stack_config={**stack, "embedding_size": 11}),
                {"feature_index_prefix_bit": 9, **slot()},
                {"slots_config": {"item": {"dim": 8}}},
            )
        ]
        # Other numbers of groups put the same slots' rows elsewhere.
        configs += [slots("a", "b"), slots("b", "a"), slots("a", "b", groups={"g": ["a", "b"]})]
        hashes = {config.schema_hash() for config in configs}
        assert len(hashes) == len(configs)
        assert all(len(value) == 16 and int(value, 16) >= 0 for value in hashes)

    @settings(deadline=None)  # a busy machine is no failure
    @given(st.permutations(["a", "b", "c", "d"]), st.permutations(["a", "b", "c", "d"]))
    def test_order_counts_exactly_where_it_numbers_groups(self, one, other):
        first, second = slots(*one), slots(*other)
        same_numbers = first.group_numbers() == second.group_numbers()
        assert (first.schema_hash() == second.schema_hash()) == same_numbers


def test_a_range_stands_for_slots_in_the_order_of_the_file():
    dims = {"user": 4, "C{9..11}": 8, "C10": 2}
    config = parse_embedding_config({"slots_config": {name: {"dim": dim} for name, dim in dims.items()}})
    assert {name: slot.dim for name, slot in config.slots_config.items()} == {
        "user": 4,
        "C9": 8,
        "C10": 2,  # by its own key
        "C11": 8,
    }
    assert config.group_numbers() == {"user": 1, "C9": 2, "C10": 3, "C11": 4}
    written_out = slots("C08", "C09", "C10", groups={"shared": ["C08", "C09"]})
    assert slots("C{08..10}", groups={"shared": ["C{08..09}"]}).schema_hash() == written_out.schema_hash()


def test_a_range_and_its_slots_are_one_config_in_python():
    assert SlotsConfig(slots_config={"C{1..2}": SlotConfig(dim=8)}) == slots("C1", "C2")


@pytest.mark.parametrize("order", [["C3", "C{1..3}", "C{3..4}"], ["C{3..4}", "C{1..3}", "C3"]])
def test_a_name_alone_decides_between_ranges_in_any_order(order):
    config = parse_embedding_config(
        {"slots_config": {name: {"dim": 2 if name == "C3" else 8} for name in order}}
    )
    dims = {name: slot.dim for name, slot in config.slots_config.items()}
    assert dims == {"C1": 8, "C2": 8, "C3": 2, "C4": 8}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["C{1..3}", "C{3..4}"], "'C{1..3}' and 'C{3..4}' both yield the slot C3: let ranges not overlap"),
        (["C{3..1}"], "'C{3..1}' must count up"),
        (["C{1..999999999}"], "over at most 100000 numbers"),
        (["C{1..3}_{1..2}"], "'C{1..3}_{1..2}' has 2 ranges: write one key for each value"),
    ],
)
def test_ranges_that_could_surprise_are_refused(names, message):
    assert message in refusal_of({"slots_config": {name: {"dim": 8} for name in names}})
    assert refusal_of({"slots_config": {"C{1..3}": {"dms": 8}}}).startswith("slots_config.C1.dms=8")
