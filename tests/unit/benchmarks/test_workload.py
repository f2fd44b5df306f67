"""The traffic is what README.md says it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks.workload import (
    CRITEO_KAGGLE_CARDINALITIES,
    Batch,
    FreshIds,
    Workload,
    hash_ranks,
    load_batches,
    make_batches,
    resident_batches,
    resident_ids,
    row_numbers,
    save_batches,
    zipf_ranks,
)

SMALL = Workload(cardinalities=(3, 1000, 50_000), batch_size=64, num_batches=3)


def num_distinct(batches: list[Batch]) -> int:
    return np.unique(np.concatenate([batch.values for batch in batches])).size


def test_criteo_kaggle_has_26_slots_and_33_8_million_ids() -> None:
    assert len(CRITEO_KAGGLE_CARDINALITIES) == 26
    assert sum(CRITEO_KAGGLE_CARDINALITIES) == 33_762_577


@pytest.mark.parametrize(("batch_size", "share"), [(512, 0.37), (4096, 0.22), (16384, 0.16)])
def test_share_of_distinct_ids_in_a_batch(batch_size: int, share: float) -> None:
    (batch,) = make_batches(Workload(batch_size=batch_size, num_batches=1))
    assert batch.num_ids == 26 * batch_size
    assert num_distinct([batch]) / batch.num_ids == pytest.approx(share, abs=0.006)


def test_the_cycle_touches_0_3_million_rows() -> None:
    assert num_distinct(make_batches(Workload())) == pytest.approx(0.3e6, rel=0.03)


def test_multi_hot_has_poisson_lengths_and_27_percent_distinct_ids() -> None:
    largest = tuple(sorted(CRITEO_KAGGLE_CARDINALITIES)[-8:])
    (batch,) = make_batches(Workload(cardinalities=largest, num_batches=1, mean_ids=20.0))
    assert batch.lengths.shape == (8, 4096)
    assert batch.num_ids == batch.lengths.sum()
    assert batch.lengths.mean() == pytest.approx(20.0, rel=0.01)
    assert batch.lengths.var() == pytest.approx(20.0, rel=0.05)
    assert num_distinct([batch]) / batch.num_ids == pytest.approx(0.27, abs=0.006)


def test_zipf_ranks_follow_the_law() -> None:
    cardinality, exponent, size = 1000, 1.1, 400_000
    ranks = zipf_ranks(np.random.default_rng(0), cardinality, exponent, size)
    assert ranks.min() == 0
    assert ranks.max() < cardinality
    # Mass of rank r: the integral of x ** -exponent from r + 1 to r + 2.
    edges = np.arange(1, cardinality + 2, dtype=np.float64) ** (1 - exponent)
    expected = (edges[:-1] - edges[1:]) / (edges[0] - edges[-1]) * size
    counts = np.bincount(ranks.astype(np.int64), minlength=cardinality)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # Mean 999, standard deviation sqrt(2 * 999) = 45: five of them.
    assert chi_square < 999 + 5 * 45


def test_a_slot_of_one_value_has_one_rank() -> None:
    assert set(zipf_ranks(np.random.default_rng(0), 1, 1.1, 100)) == {0}


def test_hashed_ids_are_distinct_across_ranks_and_slots_and_use_all_bits() -> None:
    ranks = np.arange(100_000, dtype=np.uint64)
    ids = np.concatenate([hash_ranks(slot, ranks) for slot in range(3)]).view(np.uint64)
    assert np.unique(ids).size == ids.size
    ones = np.unpackbits(ids.view(np.uint8)).mean()
    assert ones == pytest.approx(0.5, abs=0.001)
    assert (ids >> np.uint64(60)).max() == 15


def test_batches_are_the_same_for_the_same_seed_only() -> None:
    first, again = make_batches(SMALL), make_batches(SMALL)
    other = make_batches(dataclasses.replace(SMALL, seed=2))
    for one, same, different in zip(first, again, other, strict=True):
        assert np.array_equal(one.values, same.values)
        assert np.array_equal(one.dense, same.dense)
        assert not np.array_equal(one.values, different.values)


def test_values_are_feature_major() -> None:
    for batch in make_batches(SMALL):
        for slot, values in enumerate(np.split(batch.values, batch.lengths.sum(axis=1).cumsum()[:-1])):
            vocabulary = hash_ranks(slot, np.arange(SMALL.cardinalities[slot], dtype=np.uint64))
            assert np.isin(values, vocabulary).all()


def test_row_numbers_stay_in_their_slots_tables() -> None:
    (batch, *_) = make_batches(SMALL)
    num_rows = (3, 7, 50_000)
    rows = row_numbers(batch, num_rows)
    by_slot = np.split(rows, batch.lengths.sum(axis=1).cumsum()[:-1])
    for slot_rows, limit in zip(by_slot, num_rows, strict=True):
        assert slot_rows.min() >= 0
        assert slot_rows.max() < limit
    negative = np.flatnonzero(batch.values < 0)[0]  # ids are unsigned: -1 is 2 ** 64 - 1
    slot = int(np.searchsorted(batch.lengths.sum(axis=1).cumsum(), negative, side="right"))
    assert rows[negative] == (int(batch.values[negative]) + 2**64) % num_rows[slot]


def test_batches_survive_their_files(tmp_path: Path) -> None:
    batches = make_batches(SMALL)
    save_batches(batches, tmp_path / "batches")
    loaded = load_batches(tmp_path / "batches")
    assert len(loaded) == len(batches)
    for one, other in zip(batches, loaded, strict=True):
        for field in dataclasses.fields(Batch):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="save_batches"):
        load_batches(tmp_path)


def test_resident_batches_hold_every_id_once() -> None:
    table_rows = (5, 3000)
    found: list[list[np.ndarray]] = [[], []]
    for values, lengths in resident_batches(table_rows, Workload(), most_ids=2048):
        assert lengths.sum() == values.size <= 2048
        (slot,) = np.flatnonzero(lengths.sum(axis=1))
        found[int(slot)].append(values)
    for index, rows in enumerate(table_rows):
        ids = np.concatenate(found[index])
        assert sorted(ids) == sorted(hash_ranks(index, np.arange(rows, dtype=np.uint64)))


def test_random_fill_is_not_in_rank_order() -> None:
    ids = resident_ids(0, 1000, Workload(), "random")
    in_order = hash_ranks(0, np.arange(1000, dtype=np.uint64))
    assert (ids == in_order).mean() < 0.05
    assert sorted(ids) == sorted(in_order)


def test_fill_by_arrival_is_like_drawing_until_all_have_come() -> None:
    """Mean place of a rank in the order of first arrival, beside that of simulated draws."""
    cardinality, repeats = 12, 3000
    ranks_of = {int(i): rank for rank, i in enumerate(hash_ranks(0, np.arange(cardinality, dtype=np.uint64)))}
    exact = np.zeros(cardinality)
    simulated = np.zeros(cardinality)
    random = np.random.default_rng(3)
    for seed in range(repeats):
        ids = resident_ids(0, cardinality, Workload(seed=seed))
        exact[[ranks_of[int(i)] for i in ids]] += np.arange(cardinality)
        seen = dict.fromkeys(zipf_ranks(random, cardinality, 1.1, 600).tolist())
        simulated[list(seen)] += np.arange(cardinality)  # in the order of first appearance
    assert exact / repeats == pytest.approx(simulated / repeats, abs=0.3)  # standard error below 0.06
    assert exact[0] / repeats < 2 < 7 < exact[-1] / repeats


def test_fresh_ids_replace_the_share_and_never_repeat() -> None:
    batches = make_batches(SMALL)
    known = set(np.concatenate([batch.values for batch in batches]).tolist())
    fresh = FreshIds(0.3, seed=1)
    seen: set[int] = set()
    for batch in batches * 2:
        original = batch.values.copy()
        renewed = fresh.renew(batch)
        assert np.array_equal(batch.values, original)
        new = renewed.values[renewed.values != original].tolist()
        assert len(new) == round(0.3 * batch.num_ids)
        assert not known & set(new)
        assert not seen & set(new)
        seen |= set(new)
