"""The gate of new versions: samples from a file, drift and AUC, and what they say where they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import CorruptionError, FailedPreconditionError, InvalidArgumentError, PersiaError
from persia.serving.gate import Gate


def batch(labels: list[float] | None) -> PersiaBatch:
    users = IDTypeFeatureWithSingleID("user", np.arange(4, dtype=np.uint64))
    found = [] if labels is None else [Label(np.array(labels, np.float32).reshape(-1, 1))]
    return PersiaBatch([users], labels=found, requires_grad=False)


def written(path: Path, *batches: PersiaBatch) -> Path:
    path.write_bytes(b"".join(one.to_bytes() for one in batches))
    return path


def always(*values: float) -> Any:
    def predict(_batch: PersiaBatch) -> list[NDArray[np.float32]]:
        return [np.array(values, np.float32).reshape(-1, 1)]

    return predict


def test_drift_is_the_mean_over_all_samples_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "gate", batch(None), batch(None))
    gate = Gate.of_file(path, max_drift=0.25, min_auc=None)
    assert [sample.batch_size for sample in gate.samples] == [4, 4]
    gate.check(always(0.5, 0, 0, 0.5), always(0, 0, 0, 0))  # exactly the largest
    with pytest.raises(
        FailedPreconditionError, match="differ from those in use by 0.375 .* --gate-drift 0.25"
    ):
        gate.check(always(0.5, 0.5, 0, 0.5), always(0, 0, 0, 0))
    with pytest.raises(FailedPreconditionError, match="by nan"):
        gate.check(always(np.nan, 0, 0, 0), always(0, 0, 0, 0))
    with pytest.raises(FailedPreconditionError, match="other shapes"):
        gate.check(always(0, 0, 0), always(0, 0, 0, 0))


def test_auc_is_of_the_labels_of_all_samples(tmp_path: Path) -> None:
    # Each file alone has one class.
    path = written(tmp_path / "gate", batch([0, 0, 0, 0]), batch([1, 1, 1, 1]))
    gate = Gate.of_file(path, max_drift=None, min_auc=0.75)
    answers = iter([always(0.1, 0.2, 0.3, 0.9), always(0.5, 0.6, 0.7, 0.8)] * 2)
    gate.check(lambda one: next(answers)(one), always())  # 12 of 16 pairs are in order
    with pytest.raises(FailedPreconditionError, match="its AUC is 0.5, less than --gate-auc 0.75"):
        gate.check(always(0, 0, 0, 0), always())
    with pytest.raises(FailedPreconditionError, match="2 of its predictions are NaN"):
        gate.check(always(np.nan, 0, 0, 0), always())
    with pytest.raises(FailedPreconditionError, match="its first output has no AUC"):
        gate.check(always(0, 0), always())


@pytest.mark.parametrize(
    ("content", "options", "error", "match"),
    [
        (batch(None).to_bytes(), {}, InvalidArgumentError, "compares nothing"),
        (b"", {"max_drift": 1.0}, InvalidArgumentError, "is empty"),
        (b"PBATxxxx", {"max_drift": 1.0}, CorruptionError, "byte 0: the last batch is cut short"),
        (batch(None).to_bytes() + bytes(40), {"max_drift": 1.0}, CorruptionError, "not a batch"),
        (batch(None).to_bytes()[:-1], {"max_drift": 1.0}, CorruptionError, "cut short"),
        (batch(None).to_bytes(), {"min_auc": 0.5}, InvalidArgumentError, "has no AUC"),
        (batch([1, 1, 1, 1]).to_bytes(), {"min_auc": 0.5}, InvalidArgumentError, "has no AUC"),
        (batch([0, 1, 2, 1]).to_bytes(), {"min_auc": 0.5}, InvalidArgumentError, "has no AUC"),
    ],
)
def test_a_file_that_cannot_be_a_gate_is_refused(
    tmp_path: Path, content: bytes, options: dict[str, float], error: type[PersiaError], match: str
) -> None:
    (tmp_path / "gate").write_bytes(content)
    with pytest.raises(error, match=match):
        Gate.of_file(tmp_path / "gate", **{"max_drift": None, "min_auc": None, **options})
