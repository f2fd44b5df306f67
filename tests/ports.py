"""Ports for servers that must be told theirs."""

from __future__ import annotations

import itertools
import os

from persia.utils import find_free_port

# Below the range that Linux takes the ports of outgoing connections from: one of those may be somebody's by
# the time the server has started. Each process of pytest-xdist has a part of its own.
_FIRST, _NUM_PORTS, _NUM_PARTS = 10_000, 2_000, 10
_TURN = itertools.count(os.getpid())  # two runs of the tests begin at different places


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on, and that is not handed out again soon."""
    part = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_PARTS
    return find_free_port(_FIRST + part * _NUM_PORTS + next(_TURN) % _NUM_PORTS)
