"""Which server of the next generation has which virtual shard: by the load that was measured (ADR 67).

In: how many rows each server has looked up, by virtual shard and over the same time. Out: the shards that
another server has than the default one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from persia.errors import FailedPreconditionError
from persia.messaging.payloads import MovedShards
from persia.storage.manifest import NUM_VIRTUAL_SHARDS

# The busiest server by the mean. Below the first, no shard is moved; a change of the servers costs more.
_EVEN = 1.05
_GOAL = 1.01
_LEAST_GAIN = 0.05
_DEVIATIONS = 3.0  # counts are samples: the imbalance that chance alone gives is no reason either


def place(loads: Sequence[Sequence[int]] | NDArray[np.float64], num_servers: int) -> MovedShards:
    """Places the shards of servers with these loads, each by virtual shard, on `num_servers` new ones.

    FailedPreconditionError: there are to be as many servers as before, and their load would be no more even.
    """
    of_shards = _expected(np.array(loads, dtype=np.float64).sum(axis=0))
    by_default = np.arange(len(of_shards)) % num_servers
    moved = _balance(of_shards, by_default, num_servers)
    after = imbalance(_by_server(of_shards, moved, num_servers))
    if num_servers == len(loads):
        _check_gain(of_shards, imbalance(np.array(loads).sum(axis=1)), after, num_servers)
    elif imbalance(_by_server(of_shards, by_default, num_servers)) < after + _LEAST_GAIN:
        return ()
    (shards,) = np.nonzero(moved != by_default)
    return tuple((int(shard), int(moved[shard])) for shard in shards)


def largest_share(moved: MovedShards, num_servers: int) -> float:
    """Virtual shards of the server that gets most of them, by the mean: so are its rows, as all shards have
    about as many."""
    servers = np.arange(NUM_VIRTUAL_SHARDS) % num_servers
    for shard, server in moved:
        servers[shard] = server
    return imbalance(_by_server(np.ones(NUM_VIRTUAL_SHARDS), servers, num_servers))


def _expected(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without what chance adds: the shards with the highest counts of a sample would have lower ones in the
    next (James-Stein). The sum stays."""
    counted = counts[counts > 0]
    if not len(counted) or not counted.var():
        return counts
    share = max(0.0, 1 - counted.mean() / counted.var())  # of the differences, that are none of chance
    return np.where(counts > 0, counted.mean() + (counts - counted.mean()) * share, 0.0)


def imbalance(loads: Sequence[float] | NDArray[np.float64]) -> float:
    """The busiest server by the mean; 1 without any load."""
    total = float(np.sum(loads))
    return float(np.max(loads)) * len(loads) / total if total else 1.0


def _balance(loads: NDArray[np.float64], servers: NDArray[np.int64], num_servers: int) -> NDArray[np.int64]:
    """Moves few shards: the others have about as many rows on each server, and these take memory."""
    servers = servers.copy()
    by_server = _by_server(loads, servers, num_servers)
    if imbalance(by_server) < _even(loads, num_servers):
        return servers
    for _ in range(len(loads)):
        busiest, idlest = int(by_server.argmax()), int(by_server.argmin())
        gap = by_server[busiest] - by_server[idlest]
        (movable,) = np.nonzero((servers == busiest) & (loads > 0) & (loads < gap))
        if imbalance(by_server) <= _GOAL or not len(movable):
            break
        # The one that leaves these two servers the most even.
        shard = movable[np.abs(loads[movable] - gap / 2).argmin()]
        servers[shard] = idlest
        by_server = _by_server(loads, servers, num_servers)
    return servers


def _even(loads: NDArray[np.float64], num_servers: int) -> float:
    total = float(loads.sum())
    return max(_EVEN, 1 + _DEVIATIONS * math.sqrt(num_servers / total)) if total else math.inf


def _by_server(
    loads: NDArray[np.float64], servers: NDArray[np.int64], num_servers: int
) -> NDArray[np.float64]:
    return np.bincount(servers, weights=loads, minlength=num_servers).astype(np.float64)


def _check_gain(loads: NDArray[np.float64], before: float, after: float, num_servers: int) -> None:
    if not loads.any():
        raise FailedPreconditionError(
            "no load of the parameter servers was measured for some seconds: try again while the job trains"
        )
    if before < _even(loads, num_servers):
        raise FailedPreconditionError(
            f"the load of the {num_servers} parameter servers is even (the busiest has {before:.2f} of the "
            "mean): there is nothing to rebalance"
        )
    if before - after < _LEAST_GAIN:
        hottest = int(loads.argmax())
        raise FailedPreconditionError(
            f"the load cannot be more even (the busiest server has {before:.2f} of the mean): virtual shard "
            f"{hottest} alone has {loads[hottest] / loads.sum():.0%} of the load, and one server has all of "
            "its rows; fewer parameter servers would do"
        )
