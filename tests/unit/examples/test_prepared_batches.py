"""Batches that the ranks make themselves: the same number in each, and none from data loaders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import data_loader
import train
from settings import Settings


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_have_the_same_number_of_batches(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split = SimpleNamespace(training_batches=lambda recipe: list(range(10)))
    monkeypatch.setattr(train, "load_split", lambda *_: split)
    monkeypatch.setattr(train, "to_persia_batch", lambda batch, **_: batch)
    monkeypatch.setattr(train, "get_world_size", lambda: world_size)
    batches = []
    for rank in range(world_size):
        monkeypatch.setattr(train, "get_rank", lambda rank=rank: rank)
        batches.append(list(train.PreparedDataset(Settings.from_environment())))
    assert {len(mine) for mine in batches} == {10 // world_size}
    assert sorted(batch for mine in batches for batch in mine) == list(range(10 // world_size * world_size))


def test_a_data_loader_sends_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADULT_PREPARED_BATCHES", "1")
    data_loader.main()  # neither data nor a job is there
    assert "nothing to send" in capsys.readouterr().out
