"""Exported models give what the trained ones give, to the last bit, wherever torch models go."""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from persia.config import HashStackConfig, SlotConfig, SlotsConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad
from persia.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    ResourceExhaustedError,
)
from persia.nn import EmbeddingBagCollection, convert, export
from persia.nn.exported import KeyedRows

WIDE = EmbeddingConfig(emb_initialization=(-1.0, 1.0), weight_bound=0.0, seed=3)
STACK = HashStackConfig(hash_stack_rounds=3, embedding_size=17)
SLOTS = SlotsConfig(
    slots_config={
        "a": SlotConfig(dim=8),
        "b": SlotConfig(dim=16, sqrt_scaling=True),
        "c": SlotConfig(dim=8, sqrt_scaling=True),
        "d": SlotConfig(dim=3),
        "e": SlotConfig(dim=8, hash_stack_config=STACK),
        "f": SlotConfig(dim=3, sqrt_scaling=True, hash_stack_config=STACK),
    },
    feature_groups={"both": ("a", "c")},
)


class Bags(nn.Module):
    def __init__(self, slots: SlotsConfig = SLOTS) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(slots, Adagrad(lr=0.1), embedding_config=WIDE, num_threads=1)
        self.tower = nn.Linear(self.bags.out_features, 1)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.tower(self.bags(values, lengths))


# Negative ones are large without a sign; the last few fold onto others.
IDS = torch.cat([torch.arange(-30, 30) * (2**62 // 31), torch.arange(40), torch.tensor([-1, -2, 2**56 - 1])])


def random_batch(seed: int, size: int = 16, *, num_slots: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (num_slots, size), generator=generator)
    return IDS[torch.randint(0, len(IDS), (int(lengths.sum()),), generator=generator)], lengths


def trained_bags() -> Bags:
    """In eval mode."""
    torch.manual_seed(0)
    model = Bags()
    for seed in range(10):
        model(*random_batch(seed)).pow(2).mean().backward()
    return model.eval()


class Converted(nn.Module):
    """Every kind of converted module, two of them over one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Embedding(50, 8, padding_idx=3)
        self.mean = nn.EmbeddingBag(40, 8, mode="mean", padding_idx=1)
        self.last = nn.EmbeddingBag(40, 8, mode="sum", include_last_offset=True)
        self.tied = nn.EmbeddingBag(50, 8, mode="sum")
        self.tied.weight = self.single.weight
        self.tower = nn.Linear(40, 1)

    def forward(
        self, ids: torch.Tensor, flat: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        parts = [
            self.single(ids).sum(1),
            self.mean(flat, offsets),
            self.last(flat, torch.cat([offsets, torch.full_like(offsets[:1], flat.shape[0])])),
            self.tied(ids),
            self.tied(flat, offsets, per_sample_weights=weights),
        ]
        return self.tower(torch.cat(parts, dim=1))


def converted_batch(seed: int, size: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randint(0, 30, (size,), generator=generator).sort().values
    offsets[0] = 0
    ids = torch.randint(0, 50, (size, 3), generator=generator)
    flat = torch.randint(0, 40, (30,), generator=generator)
    return ids, flat, offsets, torch.rand(30, generator=generator)


def trained_conversion(**options: Any) -> Converted:
    torch.manual_seed(0)
    original = Converted()
    with torch.no_grad():
        original.single.weight[3] = 0.5  # the padding row need not be zeros
    model = convert(original, Adagrad(lr=0.1), **options)
    for seed in range(10):
        model(*converted_batch(seed)).pow(2).mean().backward()
    assert isinstance(model, Converted)
    return model.eval()


def equal(model: nn.Module, exported: Any, batch: tuple[torch.Tensor, ...]) -> bool:
    with torch.no_grad():
        return torch.equal(model(*batch), exported(*batch))


# --- equal outputs ---


def test_a_collection() -> None:
    model = trained_bags()
    exported = export(model)
    assert all(
        equal(model, exported, random_batch(seed, size)) for seed, size in [(50, 64), (51, 1), (52, 0)]
    )


def test_conversions() -> None:
    model = trained_conversion()
    exported = export(model)
    assert not any(type(module).__name__.startswith("Store") for module in exported.modules())
    assert all(equal(model, exported, converted_batch(seed)) for seed in range(50, 60))
    assert exported.single.table is exported.tied.table  # type: ignore[union-attr]


def test_unknown_ids_read_as_zeros_and_an_export_stays_as_it_is() -> None:
    model = convert(nn.Sequential(nn.Embedding(5, 3)), SGD(lr=1.0), grow=True, embedding_config=WIDE)
    model(torch.tensor([2**40])).sum().backward()
    exported = export(model, ids={"0": torch.tensor([4, 2**40, 77])})  # 3 has a row, too
    ids = torch.tensor([[4, 2**40], [77, 3]])
    before = exported(ids)
    assert torch.equal(before[0], model.eval()(ids)[0])
    assert not before[1].any()  # 77 has no row, 3 was not exported
    model.train()(ids).sum().backward()
    assert torch.equal(exported(ids), before)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40, unique=True),
    others=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10),
)
def test_keys_are_found_both_ways(keys: list[int], others: list[int]) -> None:
    ordered = torch.tensor(sorted(keys), dtype=torch.int64)
    table = KeyedRows(ordered, torch.arange(1.0, len(keys) + 1).unsqueeze(1))
    wanted = torch.tensor(keys + others, dtype=torch.int64)
    expected = [sorted(keys).index(key) + 1.0 if key in keys else 0.0 for key in keys + others]
    assert table(wanted).flatten().tolist() == expected
    # What stands for searchsorted in ONNX.
    if keys:
        assert torch.equal(table._lower_bound_by_halves(wanted), torch.searchsorted(ordered, wanted))


# --- where torch models go ---

DYNAMIC_BAGS = ({0: torch.export.Dim("ids")}, {1: torch.export.Dim("batch")})


def test_state_dict_and_pickle(tmp_path: Path) -> None:
    model = trained_bags()
    exported = export(model)
    torch.save(exported, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    again = pickle.loads(pickle.dumps(exported))
    again.load_state_dict(exported.state_dict())
    batch = random_batch(60)
    assert equal(model, loaded, batch)
    assert equal(model, again, batch)


def test_torchscript() -> None:
    model = trained_bags()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(export(model)), file)
    file.seek(0)
    scripted = torch.jit.load(file)
    assert equal(model, scripted, random_batch(61, 33))
    conversion = trained_conversion()
    scripted = torch.jit.script(export(conversion))
    assert equal(conversion, scripted, converted_batch(61))


@pytest.mark.filterwarnings("ignore")
def test_torch_export() -> None:
    model = trained_bags()
    program = torch.export.export(export(model), random_batch(62), dynamic_shapes=DYNAMIC_BAGS)
    assert equal(model, program.module(), random_batch(63, 33))
    conversion = trained_conversion()
    program = torch.export.export(export(conversion), converted_batch(62))
    assert equal(conversion, program.module(), converted_batch(63))


@pytest.mark.filterwarnings("ignore")
def test_onnx(tmp_path: Path) -> None:
    for needed in ("onnxscript", "onnxruntime"):
        pytest.importorskip(needed)
    import onnxruntime

    model = trained_bags()
    program = torch.onnx.export(
        export(model), random_batch(64), dynamo=True, dynamic_shapes=DYNAMIC_BAGS, verbose=False
    )
    assert program is not None
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    batch = random_batch(65, 33)
    names = [given.name for given in session.get_inputs()]
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, batch, strict=True)})
    with torch.no_grad():
        # Another runtime, with another order of the tower's sums.
        torch.testing.assert_close(torch.from_numpy(found), model(*batch), rtol=1e-5, atol=1e-6)


# --- what is left out, what is refused ---


def test_rows_that_are_small_or_not_asked_for_read_as_zeros() -> None:
    model = convert(nn.Embedding(3, 2), SGD(lr=1.0))
    model.load_weight(torch.tensor([[0.3, 0.4], [3.0, 4.0], [0.0, 0.0]]))
    exported = export(model, min_norm=1.0)
    assert exported(torch.arange(3)).tolist() == [[0, 0], [3, 4], [0, 0]]
    assert exported.table.num_keys == 1  # type: ignore[union-attr]


def test_places_are_exported_in_part_or_left_out() -> None:
    model = trained_bags()
    few, none = IDS[::2], torch.empty(0, dtype=torch.int64)
    exported = export(model, ids={"bags.b": none, "bags.d": few, "bags.e": few})
    values, lengths = random_batch(66)
    with torch.no_grad():
        expected, found = model.bags(values, lengths), exported.bags(values, lengths)  # type: ignore[operator]
        # Only slots that were cut short differ, and only in samples with an ID that is left out.
        columns = (expected != found).any(dim=0)
        assert not columns[:8].any()
        assert not found[:, 8:24].any()
        assert columns[32:35].any()
        for_few = torch.stack([few[: len(few) // 6 * 6]]).flatten()
        lengths = torch.full((6, 1), len(for_few) // 6)
        expected, found = model.bags(for_few, lengths), exported.bags(for_few, lengths)  # type: ignore[operator]
        expected[:, 8:24] = 0
        assert torch.equal(found, expected)


def test_the_size_is_limited_and_said() -> None:
    model = convert(nn.Sequential(nn.Embedding(1000, 8)), SGD(lr=1.0))
    with pytest.raises(
        ResourceExhaustedError, match=r"1,000 rows and 40,000 bytes up to '0', more than max_bytes=39,999"
    ):
        export(model, max_bytes=39_999)
    with pytest.raises(
        ResourceExhaustedError, match=r"10 rows and 400 bytes .*ids=, min_norm= or min_updates="
    ):
        export(model, max_bytes=399, ids={"0": torch.arange(10)})
    assert export(model, max_bytes=40_000)(torch.tensor([999])).shape == (1, 8)


@pytest.mark.parametrize("least", [1, 3, 9, 10_000])
def test_rows_with_few_updates_are_left_out_to_the_row(least: int, caplog: pytest.LogCaptureFixture) -> None:
    """Beside a count in Python: one for each backward pass that had the ID, however often."""
    caplog.set_level("INFO")
    model = convert(
        nn.Embedding(50, 4), Adagrad(lr=0.1), grow=True, embedding_config=WIDE, count_updates=True
    )
    expected = Counter(dict.fromkeys(range(50), 0))
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        ids = (torch.rand(2, 8, generator=generator).pow(3) * 80).long()
        output = model(ids[0]).sum() + model(ids[1]).sum()
        model(torch.tensor([7]))  # looked up, and never trained
        if step % 10:
            output.backward()
            expected.update(set(ids.flatten().tolist()))
    kept = sorted(id_ for id_, count in expected.items() if count >= least)
    exported = export(model, min_updates=least)
    assert exported.table.keys.tolist() == kept  # type: ignore[union-attr]
    ids = torch.tensor(kept, dtype=torch.int64)
    assert torch.equal(exported(ids), model.eval()(ids))
    num_left_out = model.rows.stats().num_rows - len(kept)
    sizes = (len(kept), f"{24 * len(kept):,}", num_left_out, f"{24 * num_left_out:,}")
    assert "{} rows, {} bytes; left out {} rows, {} bytes".format(*sizes) in caplog.text


def test_updates_are_counted_across_slots_that_share_rows() -> None:
    bags = EmbeddingBagCollection(SLOTS, Adagrad(lr=0.1), embedding_config=WIDE, count_updates=True)
    trained = []
    for seed in range(10):
        values, lengths = random_batch(seed)
        bags(values, lengths).pow(2).mean().backward()
        trained.append(values.split(lengths.sum(1).tolist()))
    bags.eval()
    exported = export(bags, min_updates=5)
    one_each = torch.zeros(6, 1, dtype=torch.int64)
    for slot in (0, 3):  # "a" shares rows with "c"; "d" is by itself
        slots_of_row = (0, 2) if slot == 0 else (3,)
        for id_ in IDS.unique():
            num_batches = sum(any((batch[i] == id_).any() for i in slots_of_row) for batch in trained)
            lengths = one_each.clone()
            lengths[slot] = 1
            found, expected = exported(id_[None], lengths), bags(id_[None], lengths)
            # Large IDs, without a sign, fold onto others' rows, which have the updates of both.
            if num_batches >= 5:
                assert torch.equal(found, expected)
            elif 0 < id_ < 40:
                assert not found.any()


def test_updates_that_are_not_counted_are_no_filter() -> None:
    model = convert(nn.Sequential(nn.Embedding(5, 3)), SGD(lr=1.0))
    with pytest.raises(FailedPreconditionError, match="'0' does not count updates.*count_updates=True"):
        export(model, min_updates=1)
    with pytest.raises(FailedPreconditionError, match="counts_updates"):
        model[0].rows.num_updates(torch.tensor([1]))


def test_a_load_begins_the_count_anew(tmp_path: Path) -> None:
    model = convert(nn.Embedding(3, 2), SGD(lr=1.0), count_updates=True)
    model(torch.tensor([1])).sum().backward()
    assert export(model, min_updates=1).table.keys.tolist() == [1]  # type: ignore[union-attr]
    model.rows.dump(tmp_path)
    model.rows.load(tmp_path)
    assert export(model, min_updates=1).table.keys.tolist() == []  # type: ignore[union-attr]


def test_ids_for_no_place_and_of_no_ids() -> None:
    grown = convert(nn.Sequential(nn.Embedding(5, 3)), SGD(lr=1.0), grow=True)
    with pytest.raises(InvalidArgumentError, match="ids has 'x', which is no place of rows: they are 0"):
        export(grown, ids={"0": IDS, "x": IDS})
    with pytest.raises(InvalidTypeError, match=r"ids\['0'\] must be"):
        export(grown, ids={"0": torch.rand(3)})


def test_what_cannot_be_exported() -> None:
    with pytest.raises(InvalidArgumentError, match="Linear has no converted module"):
        export(nn.Linear(2, 2))
    with pytest.raises(InvalidTypeError, match="model is a dict"):
        export({})  # type: ignore[arg-type]


def test_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["persia.nn.export"], "_PART_BYTES", 20_000)
    model = trained_bags()
    assert model.bags.stats().memory_bytes > 3 * 20_000
    assert equal(model, export(model), random_batch(68))


def test_a_collection_without_rows() -> None:
    model = Bags().eval()
    assert equal(model, export(model), random_batch(69))
