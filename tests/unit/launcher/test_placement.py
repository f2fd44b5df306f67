"""Which virtual shards are moved: few, until the measured load is even, and none where that gains nothing."""

from __future__ import annotations

import numpy as np
import pytest

from persia.errors import FailedPreconditionError
from persia.launcher.placement import imbalance, largest_share, place
from persia.storage.manifest import NUM_VIRTUAL_SHARDS

SHARDS = np.arange(NUM_VIRTUAL_SHARDS)


def by_server(loads: np.ndarray, moved: tuple[tuple[int, int], ...], num_servers: int) -> list[int]:
    servers = SHARDS % num_servers
    for shard, server in moved:
        assert servers[shard] != server
        servers[shard] = server
    return [int(loads[servers == server].sum()) for server in range(num_servers)]


def of_servers(loads: np.ndarray, num_servers: int) -> list[list[int]]:
    return [np.where(SHARDS % num_servers == server, loads, 0).tolist() for server in range(num_servers)]


@pytest.mark.parametrize("num_servers", [2, 3, 16])
def test_uneven_load_becomes_even_by_few_moves(num_servers: int) -> None:
    loads = np.random.default_rng(5).zipf(1.5, NUM_VIRTUAL_SHARDS).clip(max=2000)
    loads[SHARDS % num_servers == 0] *= 4
    assert imbalance(by_server(loads, (), num_servers)) > 1.5
    moved = place(of_servers(loads, num_servers), num_servers)
    assert imbalance(by_server(loads, moved, num_servers)) < 1.02
    assert len(moved) < NUM_VIRTUAL_SHARDS / 10


def test_what_chance_has_added_to_a_sample_is_not_placed() -> None:
    loads = np.where(SHARDS % 2 == 0, 60, 0)
    sample = np.random.default_rng(3).poisson(loads)
    moved = place(of_servers(sample, 2), 2)
    assert imbalance(by_server(loads, moved, 2)) < 1.03


def test_the_server_with_the_most_virtual_shards_is_told() -> None:
    assert largest_share((), 2) == 1.0
    assert largest_share(tuple((shard, 1) for shard in range(0, 1024, 2)), 2) == 1.25


def test_virtual_shards_without_load_stay() -> None:
    loads = np.zeros(NUM_VIRTUAL_SHARDS, dtype=int)
    loads[:80:2] = 50
    moved = place(of_servers(loads, 2), 2)
    assert len(moved) == 20
    assert by_server(loads, moved, 2) == [1000, 1000]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4)])
def test_another_number_of_servers_is_placed_by_the_load(before: int, after: int) -> None:
    even = np.full(NUM_VIRTUAL_SHARDS, 100)
    assert place(of_servers(even, before), after) == ()
    assert place([[0] * NUM_VIRTUAL_SHARDS] * before, after) == ()
    uneven = np.where(SHARDS % after == 0, 300, 100)
    moved = place(of_servers(uneven, before), after)
    assert imbalance(by_server(uneven, moved, after)) < 1.02
    hot = np.zeros(NUM_VIRTUAL_SHARDS, dtype=int)
    hot[5] = 1000  # wherever it is, its server has all the load
    assert place(of_servers(hot, before), after) == ()


def test_what_cannot_be_more_even_is_refused() -> None:
    loads = np.zeros(NUM_VIRTUAL_SHARDS, dtype=int)
    with pytest.raises(FailedPreconditionError, match="no load of the parameter servers was measured"):
        place(of_servers(loads, 2), 2)
    few = np.where(SHARDS == 4, 40, np.where(SHARDS == 7, 20, 0))  # as chance may have it
    with pytest.raises(FailedPreconditionError, match=r"is even \(the busiest has 1.33"):
        place(of_servers(few, 2), 2)
    with pytest.raises(FailedPreconditionError, match=r"is even \(the busiest has 1.02 of the mean\)"):
        place(of_servers(loads + np.where(SHARDS % 2, 96, 100), 2), 2)
    loads[7] = 900  # one ID has nearly all the load
    loads[8] = 100
    with pytest.raises(FailedPreconditionError, match="virtual shard 7 alone has 90% of the load"):
        place(of_servers(loads, 2), 2)
