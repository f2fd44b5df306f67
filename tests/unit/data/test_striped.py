"""Stripes of batches: each batch once, whatever the numbers of loaders before and after a resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia.data import FeatureSpec, SplitBinaryBatches, SplitBinaryWriter, StripedBatches
from persia.errors import FailedPreconditionError, InvalidArgumentError

ROWS, SIZE = 110, 10


@pytest.fixture
def batches(tmp_path: Path) -> SplitBinaryBatches:
    spec = FeatureSpec.make(tmp_path, [ROWS], num_numerical=0)
    with SplitBinaryWriter(spec, "train") as writer:
        writer.write(None, [np.arange(ROWS)], np.zeros(ROWS))
    return SplitBinaryBatches(tmp_path, batch_size=SIZE, shuffle_seed=9, block_size=2)


def rows_of(taken: Iterator[Any]) -> list[list[int]]:
    return [batch.id_type_features[0].ids.tolist() for batch in taken]


def test_one_stripe_has_all_epochs_in_their_orders(batches: SplitBinaryBatches) -> None:
    found = rows_of(iter(StripedBatches(batches, epochs=2)))
    expected = [
        batches.of_epoch(epoch).make(number, requires_grad=True).id_type_features[0].ids.tolist()
        for epoch in range(2)
        for number in range(11)
    ]
    assert found == expected
    assert found[:11] != found[11:]


@pytest.mark.parametrize("first", [0, 3, 9, 11, 50])
def test_a_stripe_begins_at_a_position(batches: SplitBinaryBatches, first: int) -> None:
    """And its state means the same as after so many batches."""
    for stripe in range(2):
        whole = rows_of(iter(StripedBatches(batches, stripe, 2, epochs=2)))
        begun = StripedBatches(batches, stripe, 2, epochs=2, first=first)
        assert begun.state_dict()["num_yielded"] == first
        assert rows_of(iter(begun)) == whole[first:]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("counts", [(1, 1), (3, 2), (2, 5), (4, 13)])
def test_every_row_once_with_other_numbers_of_loaders(
    batches: SplitBinaryBatches, counts: tuple[int, int], epochs: int
) -> None:
    before, after = counts
    seen: Counter[int] = Counter()
    states: Any = None
    # Stopped twice, each stripe after another number of batches; then to the end.
    for run, count in enumerate((before, after, before)):
        stripes = [StripedBatches(batches, index, count, epochs=epochs) for index in range(count)]
        for index, stripe in enumerate(stripes):
            if states is not None:
                stripe.load_state_dict(states)
            limit = None if run == 2 else index % 3
            seen.update(row for rows in rows_of(islice(stripe, limit)) for row in rows)
        states = json.loads(json.dumps([stripe.state_dict() for stripe in reversed(stripes)]))
    assert seen == Counter(dict.fromkeys(range(ROWS), epochs))


def test_the_same_loaders_continue_with_the_same_batches(batches: SplitBinaryBatches) -> None:
    whole = rows_of(iter(StripedBatches(batches)))
    first = StripedBatches(batches)
    begun = rows_of(islice(first, 4))
    second = StripedBatches(batches)
    second.load_state_dict(first.state_dict())
    assert begun + rows_of(iter(second)) == whole
    assert begun + rows_of(iter(first)) == whole  # and a second iteration continues, too
    assert rows_of(iter(first)) == []


def test_states_that_do_not_fit(batches: SplitBinaryBatches, tmp_path: Path) -> None:
    stripes = [StripedBatches(batches, index, 2) for index in range(2)]
    states = [stripe.state_dict() for stripe in stripes]
    with pytest.raises(InvalidArgumentError, match=r"stripes \[0\] of 2"):
        stripes[0].load_state_dict(states[:1])
    with pytest.raises(InvalidArgumentError, match=r"stripes \[1, 1\] of 2"):
        stripes[0].load_state_dict([states[1], states[1]])
    with pytest.raises(InvalidArgumentError, match="different runs"):
        stripes[0].load_state_dict([states[0], {**states[1], "next": 3}])
    with pytest.raises(InvalidArgumentError, match="states is empty"):
        stripes[0].load_state_dict([])
    other = StripedBatches(SplitBinaryBatches(tmp_path, batch_size=20))
    with pytest.raises(FailedPreconditionError, match="of 11 batches, there are 6"):
        other.load_state_dict(states)
    with pytest.raises(InvalidArgumentError, match="stripe=2 must be below num_stripes=2"):
        StripedBatches(batches, 2, 2)


@pytest.mark.parametrize("stripe", [0, 1])
@pytest.mark.parametrize(("num_read", "found"), [(0, 0), (3, 3), (9, 9), (12, None)])
@pytest.mark.parametrize("first", [0, 2])
def test_a_wrong_length_is_an_error(
    batches: SplitBinaryBatches, num_read: int, found: int | None, first: int, stripe: int
) -> None:
    """Not an endless loop, nor batches of the first epoch taken for those of the second."""

    class Wrong:
        def __len__(self) -> int:
            return 11

        def read(self, first: int = 0) -> Iterator[int]:
            return iter(range(first, num_read))

        def make(self, rows: int, *, requires_grad: bool, meta: bytes | None = None) -> Any:
            return batches.make(rows % 11, requires_grad=requires_grad, meta=meta)

    begin = stripe + 2 * first  # the batches before are not asked for
    does = "yields more" if found is None else f"ends before batch {max(found, begin)}"
    taken: list[Any] = []
    with pytest.raises(
        InvalidArgumentError, match=rf"Wrong has 11 batches .* read\(\) {does}: return from len"
    ):
        taken.extend(StripedBatches(Wrong(), stripe, 2, epochs=3, first=first))
    assert len(taken) == len(range(begin, min(num_read, 11), 2))
