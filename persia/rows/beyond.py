"""Rows that stay on servers when their slot moves into the dense model: of IDs from its cardinality on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from persia.errors import PersiaError
from persia.logger import get_default_logger
from persia.rows.reader import RowGroups, RowReader, Span
from persia.storage.location import Location
from persia.storage.manifest import NUM_VIRTUAL_SHARDS, EmbeddingSection


def warn_of_rows_beyond(
    location: Location, section: EmbeddingSection | None, limits: Mapping[str, int]
) -> None:
    """Says how many rows of a checkpoint a load leaves on servers.

    `section`: that of the checkpoint at `location`. `limits`: the cardinalities of slots that have moved.
    """
    if section is None or section.in_place or not limits:  # tiers have no files to count in
        return
    try:
        counts, is_estimate = count_beyond(location, limits)
    except PersiaError as failure:  # a warning must not fail a load that has succeeded
        get_default_logger().warning(
            "the rows of %s whose IDs are not below the cardinality of slots that move into the dense model "
            "were not counted: %s",
            location,
            failure,
        )
        return
    for name, count in counts.items():
        get_default_logger().warning(
            "slot %r moves into the dense model without %s%d rows of %s, whose IDs are not below its "
            "cardinality of %d: they stay on the servers, and batches with such IDs are refused. Raise the "
            "cardinality above every ID, or choose placement: servers, and load the checkpoint again",
            name,
            "about " if is_estimate else "",
            count,
            location,
            limits[name],
        )


def count_beyond(
    location: Location, limits: Mapping[str, int], max_bytes: int = 256 << 20
) -> tuple[dict[str, int], bool]:
    """How many rows of each slot have an ID from its limit on, and whether that is an estimate.

    Of a checkpoint with more than about `max_bytes` of rows, a sample of the virtual shards is read. Slots
    without such rows, and slots that share a feature group, are left out.
    """
    reader = RowReader(location)
    num_bytes = sum(entry.num_bytes for entry in reader.section.files)
    # Virtual shards are ranges of a hash of the sign, so some of them are a fair sample of all rows, and can
    # be read without the others.
    num_shards = max(1, min(NUM_VIRTUAL_SHARDS, NUM_VIRTUAL_SHARDS * max_bytes // max(num_bytes, 1)))
    groups, counts = RowGroups(reader.section.schema), dict.fromkeys(limits, 0)
    for block in reader.blocks(Span(0, num_shards - 1)):
        for name, places in groups.split(block.signs):
            if name in limits:
                beyond = groups.ids(block.signs[places]) >= np.uint64(limits[name])
                counts[name] += int(np.count_nonzero(beyond))
    counts = {name: count * NUM_VIRTUAL_SHARDS // num_shards for name, count in counts.items() if count}
    return counts, num_shards < NUM_VIRTUAL_SHARDS
