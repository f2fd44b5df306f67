"""What a process tells about the packets of a training that it follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia.observability.exposition import Families

__all__ = ["add_following"]


def add_following(families: Families, following: Mapping[str, Any]) -> None:
    """`following`: as `FollowStatus.to_json()` of persia.packets.follower."""
    for name, key, text in _GAUGES:
        if following[key] is not None:
            families.gauge(name, text, following[key])
    for name, key, text in _COUNTERS:
        families.counter(name, text, following[key])
    families.gauge(
        "persia_inc_stuck",
        "1: something keeps it from going on; /status says what.",
        bool(following["error"]),
    )


_GAUGES = (
    ("inc_update_delay_sec", "delay_s", "From the oldest update of the last packet until it was visible."),
    ("persia_inc_applied_number", "number", "Number of the last packet applied."),
    ("persia_inc_behind", "num_behind", "Packets written and not applied yet."),
    ("persia_inc_pinned", "pinned", "1: a pin holds it at a packet."),
)
_COUNTERS = (
    ("persia_inc_packets_applied", "num_applied", "Packets applied."),
    ("persia_inc_packet_retries", "num_retries", "Tries to apply a packet that failed."),
    ("persia_inc_packets_failed", "num_failed", "Packets given up, until they change."),
    (
        "persia_inc_storage_errors",
        "num_storage_errors",
        "Looks that failed: storage or a server was away.",
    ),
    (
        "persia_inc_checkpoints_loaded",
        "num_checkpoints",
        "Beginnings loaded: the first, and fall-backs.",
    ),
)
