"""What a parameter server tells about the pool beneath its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia.observability.exposition import Families

__all__ = ["add_tier"]


def add_tier(families: Families, tier: Mapping[str, Any]) -> None:
    """`tier`: as `ServerTier.status()` of persia.tiers.server_tier."""
    for name, key, text in _COUNTERS:
        families.counter(name, text, tier[key])
    for name, key, text in _GAUGES:
        if tier[key] is not None:
            families.gauge(name, text, tier[key])


_COUNTERS = (
    ("persia_tier_hits", "num_hits", "Rows that lookups found in the cache."),
    ("persia_tier_misses", "num_misses", "Rows that lookups had to read from the pool."),
    ("persia_tier_promoted_rows", "num_promoted", "Rows brought from the pool to the cache."),
    ("persia_tier_prefetched_rows", "num_prefetched", "Of these, ahead of the lookup that names them."),
    ("persia_tier_unheeded_ids", "num_unheeded", "IDs announced ahead of their lookup that had no room."),
    ("persia_tier_demoted_rows", "num_demoted", "Rows that left the cache for the pool."),
    ("persia_tier_written_rows", "num_written", "Versions of rows written to the pool."),
)
_GAUGES = (
    ("persia_tier_cached_rows", "num_hot", "Rows in the cache."),
    ("persia_tier_memory_bytes", "memory_bytes", "Memory of the cache and of the index of all rows."),
    ("persia_tier_pool_bytes", "pool_bytes", "Size of the pool's file."),
    ("persia_tier_pool_max_bytes", "pool_max_bytes", "Size that the pool's file may grow to."),
    ("persia_tier_pool_used_bytes", "pool_used_bytes", "Bytes of the pool with rows that are needed."),
    ("persia_tier_kept_versions", "num_kept", "Older versions of rows, kept for a checkpoint."),
    ("persia_tier_pending_checkpoints", "num_pending", "Checkpoints begun and not committed."),
    ("persia_tier_committed_step", "step", "Step of training of the checkpoint that rows go back to."),
)
