"""Arrays of the data set as the `PersiaBatch` that the pipeline carries."""

from __future__ import annotations

from dataset import CATEGORICAL, Split
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch


def to_persia_batch(split: Split, requires_grad: bool) -> PersiaBatch:
    """One ID feature for each categorical column; training batches ask for gradients, test batches do not."""
    id_features = [
        # Columns of a row-major array are strided; features are sent as they lie, so they must be contiguous.
        IDTypeFeatureWithSingleID(name, split.ids[:, column].copy())
        for column, name in enumerate(CATEGORICAL)
    ]
    return PersiaBatch(
        id_features,
        non_id_type_features=[NonIDTypeFeature(split.dense, name="continuous")],
        labels=[Label(split.labels, name="income")],
        requires_grad=requires_grad,
    )
