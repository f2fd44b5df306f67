"""The gate: what a version must predict on samples before it replaces one that it does not continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia.embedding.data import PersiaBatch, split_batches
from persia.errors import CorruptionError, FailedPreconditionError, InvalidArgumentError
from persia.nn.metrics import ClickMetrics

__all__ = ["Gate", "drift_of"]

_Predict = Callable[[PersiaBatch], list[NDArray[Any]]]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Compares predictions of a new version with those of the version that answers."""

    # Decoded once: each new version is tried on the same samples.
    samples: Sequence[PersiaBatch]
    max_drift: float | None = None  # mean absolute difference of all predictions
    min_auc: float | None = None  # of the first output, on the first labels

    @classmethod
    def of_file(cls, path: Path, *, max_drift: float | None, min_auc: float | None) -> Gate:
        """`path` has one or more `PersiaBatch.to_bytes()`, one after the other.

        InvalidArgumentError: nothing to compare, or labels that have no AUC. CorruptionError: no batches.
        """
        if max_drift is None and min_auc is None:
            raise InvalidArgumentError("--gate compares nothing: give --gate-drift, --gate-auc, or both")
        try:
            samples = [PersiaBatch.from_bytes(content) for content in split_batches(path.read_bytes())]
        except CorruptionError as failure:
            raise CorruptionError(f"{path} (--gate): {failure}") from failure
        if not samples:
            raise InvalidArgumentError(f"{path} (--gate) is empty: write PersiaBatch.to_bytes() of samples")
        if min_auc is not None:
            labels = [_labels(sample) for sample in samples if sample.labels]
            if len(labels) < len(samples) or np.unique(np.concatenate(labels)).tolist() != [0, 1]:
                raise InvalidArgumentError(
                    f"{path} (--gate) has no AUC: give every sample a label of 0 or 1, and have both, or "
                    "leave --gate-auc out"
                )
        return cls(samples=samples, max_drift=max_drift, min_auc=min_auc)

    def predictions(self, predict: _Predict) -> list[list[NDArray[Any]]]:
        """The outputs for each sample. FailedPreconditionError: the version does not take the samples."""
        try:
            return [predict(sample) for sample in self.samples]
        except InvalidArgumentError as failure:
            raise FailedPreconditionError(f"the samples of --gate cannot be answered: {failure}") from failure

    def check(self, candidate: _Predict, current: _Predict) -> None:
        """FailedPreconditionError says by how much `candidate` fails."""
        # The version in use predicts anew each time. It follows packets, so its predictions of yesterday say
        # nothing about a change of today.
        new = self.predictions(candidate)
        if self.max_drift is not None:
            drift = drift_of(new, self.predictions(current))
            if not drift <= self.max_drift:  # NaN fails, too
                raise FailedPreconditionError(
                    f"its predictions differ from those in use by {drift:.6g} on average, "
                    f"more than --gate-drift {self.max_drift:g}"
                )
        if self.min_auc is not None:
            auc = self._auc(new)
            if not auc >= self.min_auc:
                raise FailedPreconditionError(f"its AUC is {auc:.6g}, less than --gate-auc {self.min_auc:g}")

    def _auc(self, predictions: list[list[NDArray[Any]]]) -> float:
        metrics = ClickMetrics(window=sum(sample.batch_size for sample in self.samples))
        for sample, (first, *_) in zip(self.samples, predictions, strict=True):
            try:
                metrics.update(torch.from_numpy(first), torch.from_numpy(_labels(sample)))
            except (InvalidArgumentError, TypeError) as failure:
                raise FailedPreconditionError(
                    f"its first output has no AUC (--gate-auc): {failure}"
                ) from failure
        quality = metrics.compute()
        # Metrics leave such samples out, and the rest could still have a good AUC.
        if quality.num_nonfinite:
            raise FailedPreconditionError(f"{quality.num_nonfinite} of its predictions are NaN or infinite")
        return quality.auc


def _labels(sample: PersiaBatch) -> NDArray[np.float32]:
    return sample.labels[0].data.astype(np.float32).ravel()


def drift_of(new: list[list[NDArray[Any]]], old: list[list[NDArray[Any]]]) -> float:
    """The mean absolute difference of all outputs of all samples. FailedPreconditionError: other shapes."""
    shapes = [[output.shape for output in outputs] for outputs in new]
    if shapes != [[output.shape for output in outputs] for outputs in old]:
        raise FailedPreconditionError("its outputs have other shapes than those in use")
    pairs = [pair for of_sample in zip(new, old, strict=True) for pair in zip(*of_sample, strict=True)]
    total = sum(float(np.abs(a.astype(np.float64) - b.astype(np.float64)).sum()) for a, b in pairs)
    return total / max(1, sum(a.size for a, _ in pairs))
