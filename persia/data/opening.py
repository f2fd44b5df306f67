"""Opens the data that a feature spec describes, of either kind."""

from __future__ import annotations

import os

from persia.data.feature_spec import FeatureSpec
from persia.data.parquet import ParquetBatches
from persia.data.split_binary import SplitBinaryBatches


def open_batches(
    spec: FeatureSpec | str | os.PathLike[str],
    mapping: str = "train",
    *,
    batch_size: int = 32768,
    shuffle_seed: int | None = None,
) -> SplitBinaryBatches | ParquetBatches:
    """The batches of one mapping of a feature spec, whichever type its files are.

    Args:
        spec: a `FeatureSpec`, or the path of one.
        mapping: `train`, `test` or another name in its `source_spec`.
        batch_size: rows of a batch.
        shuffle_seed: shuffles batches of split binary and row groups of Parquet; None: the order of files.

    Raises what `SplitBinaryBatches` or `ParquetBatches.of_spec` raises.
    """
    spec = spec if isinstance(spec, FeatureSpec) else FeatureSpec.load(spec)
    if mapping not in spec.parquet:
        return SplitBinaryBatches(spec, mapping, batch_size=batch_size, shuffle_seed=shuffle_seed)
    return ParquetBatches.of_spec(spec, mapping, batch_size=batch_size, shuffle_seed=shuffle_seed)
