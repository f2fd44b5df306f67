"""How good a model's predictions are, over the last samples, while it trains.

`update` copies a batch into a ring on the predictions' device: some microseconds, and no synchronisation with
an accelerator. `compute` does the work, and is exact: it sorts what the ring holds. Over several ranks it
gathers their rings first, so the result is that of all samples and the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed as dist

from persia.embedding.checks import checked_integer
from persia.errors import InvalidArgumentError, InvalidTypeError
from persia.nn.replicas import gather_ragged

_DTYPES = (torch.float32, torch.float32, torch.int64)  # of predictions, labels, users
_EPSILON = float(np.finfo(np.float32).eps)  # predictions of 0 and 1 are taken for this close to them


@dataclass(frozen=True)
class ClickQuality:
    """Metrics of probabilities of labels 0 and 1. NaN where there is nothing to compare, as in one class."""

    num_samples: int
    num_nonfinite: int  # samples left out, whose prediction was NaN or infinite
    auc: float  # the chance that a positive is above a negative; a tie is half
    # The mean of the users' AUC by their samples; users of one class are left out. None: none were given.
    gauc: float | None
    log_loss: float  # in nats
    normalized_entropy: float  # the log loss over that of always predicting the mean label
    calibration: float  # the mean prediction over the mean label

    def values(self) -> dict[str, float]:
        """The metrics by their names, without `gauc` if no users were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def summary(self) -> str:
        """The metrics that a log shows, in one line; `num_nonfinite` only if it is not 0."""
        names = ["auc", "log_loss", "normalized_entropy", "calibration"]
        names += ["num_nonfinite"] if self.num_nonfinite else []
        return ", ".join(f"{name} {getattr(self, name):.5g}" for name in names)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:.6g}" for name, value in self.values().items())


class ClickMetrics:
    """The `ClickQuality` of the last `window` samples. Not for several threads at once.

    Args:
        window: samples; each takes 8 bytes, 16 with users.
        from_logits: predictions are logits, not probabilities.

    Raises:
        InvalidArgumentError: a window below 1.

    Examples:
        >>> metrics = ClickMetrics(window=100_000)
        >>> for step, (inputs, labels, users) in enumerate(batches):
        ...     output = model(inputs)
        ...     metrics.update(output, labels, users)
        ...     if step % 1000 == 0:
        ...         print(metrics.compute())
    """

    def __init__(self, window: int = 100_000, *, from_logits: bool = False) -> None:
        if checked_integer("window", window) < 1:
            raise InvalidArgumentError(f"window={window} must be at least 1 sample")
        self.window = window
        self.from_logits = from_logits
        self.reset()

    def reset(self) -> None:
        """Forgets all samples."""
        self._num_seen = 0
        self._rings: list[torch.Tensor] = []  # of predictions, labels and, where they are given, users

    def update(
        self, predictions: torch.Tensor, labels: torch.Tensor, users: torch.Tensor | None = None
    ) -> None:
        """Adds a batch.

        Args:
            predictions: a floating dtype, [batch] or [batch, 1].
            labels: 0 or 1 of any dtype, with as many elements; looked at by `compute`.
            users: int64, with as many elements; with every batch or with none. GAUC needs them.

        Raises:
            InvalidArgumentError: sizes that differ; users in some batches only.
            InvalidTypeError: another dtype or type.
        """
        columns = self._checked(predictions, labels, users)
        if not self._rings:
            dtypes, device = _DTYPES[: len(columns)], predictions.device
            self._rings = [torch.empty(self.window, dtype=dtype, device=device) for dtype in dtypes]
        size = len(columns[0])
        # Of a batch larger than the window only the last samples are copied.
        kept = min(size, self.window)
        begin = (self._num_seen + size - kept) % self.window
        # Two copies where the batch wraps around the end of the ring; the second is empty otherwise.
        until_end = min(kept, self.window - begin)
        for ring, column in zip(self._rings, columns, strict=True):
            last = column[size - kept :]
            ring[begin : begin + until_end].copy_(last[:until_end], non_blocking=True)
            ring[: kept - until_end].copy_(last[until_end:], non_blocking=True)
        self._num_seen += size

    def compute(self, group: dist.ProcessGroup | None = None) -> ClickQuality:
        """The metrics of the window; of all ranks' windows where `group` is given, and every rank calls it.

        Raises:
            InvalidArgumentError: a label that is neither 0 nor 1.
        """
        size = min(self._num_seen, self.window)
        # A rank without batches takes part all the same, and does not know whether there are users.
        absent = [torch.empty(0, dtype=dtype) for dtype in _DTYPES[len(self._rings) :]]
        rings = [ring[:size] for ring in (*self._rings, *absent)]
        if group is not None:
            rings = [torch.cat(gather_ragged(ring, group)) for ring in rings]
        predictions, labels, users = (ring.cpu().numpy() for ring in rings)
        return _quality(predictions, labels, users if len(users) else None, from_logits=self.from_logits)

    def _checked(self, *columns: torch.Tensor | None) -> list[torch.Tensor]:
        names = ("predictions", "labels", "users")
        flat = []
        # Flat: [batch] against [batch, 1] would broadcast to a square.
        for name, column in zip(names, columns, strict=True):
            if column is None:
                continue
            if not isinstance(column, torch.Tensor):
                raise InvalidTypeError(f"{name} is a {type(column).__name__}, must be a torch.Tensor")
            flat.append(column.detach().reshape(-1))
        if not flat[0].is_floating_point():
            raise InvalidTypeError(f"predictions is {flat[0].dtype}, must be of a floating dtype")
        for name, column in zip(names, flat, strict=False):
            if len(column) != len(flat[0]):
                raise InvalidArgumentError(
                    f"{name} has {len(column)} elements, must have one for each of the "
                    f"{len(flat[0])} predictions"
                )
        if columns[2] is not None and columns[2].dtype != torch.int64:
            raise InvalidTypeError(f"users is {columns[2].dtype}, must be torch.int64")
        if self._rings and len(self._rings) != len(flat):
            raise InvalidArgumentError(
                "users was given with some batches and not with others: give it with all or none, or reset()"
            )
        return flat


def quality_of(
    predictions: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    *,
    from_logits: bool,
    group: dist.ProcessGroup | None = None,
) -> ClickQuality:
    """The `ClickQuality` of an evaluation; both lists have one tensor for each batch.

    With a `group`, that of the batches of all its ranks. Every rank calls it, also one without batches.
    """
    metrics = ClickMetrics(max(1, sum(map(len, predictions))), from_logits=from_logits)
    if predictions:
        metrics.update(torch.cat(list(predictions)), torch.cat(list(labels)))
    return metrics.compute(group)


def _quality(
    predictions: NDArray[np.float32],
    labels: NDArray[np.float32],
    users: NDArray[np.int64] | None,
    *,
    from_logits: bool,
) -> ClickQuality:
    is_positive = labels == 1
    if not (is_positive | (labels == 0)).all():
        wrong = labels[~is_positive & (labels != 0)][0]
        raise InvalidArgumentError(f"labels has {wrong:g}, must be 0 or 1")
    is_finite = np.isfinite(predictions)
    num_nonfinite = len(predictions) - int(is_finite.sum())
    if num_nonfinite:
        predictions, is_positive = predictions[is_finite], is_positive[is_finite]
        users = None if users is None else users[is_finite]
    exact = predictions.astype(np.float64)
    if from_logits:
        # By logaddexp: the exponential of a large logit overflows.
        losses = np.logaddexp(0.0, np.where(is_positive, -exact, exact))
        probabilities = np.exp(-np.logaddexp(0.0, -exact))
    else:
        clipped = np.clip(exact, _EPSILON, 1 - _EPSILON)
        losses, probabilities = -np.log(np.where(is_positive, clipped, 1 - clipped)), exact
    log_loss, rate = _mean(losses), _mean(is_positive)
    entropy = -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0) if len(predictions) else math.nan
    return ClickQuality(
        num_samples=len(predictions),
        num_nonfinite=num_nonfinite,
        auc=_auc(predictions, is_positive),
        gauc=None if users is None else _gauc(predictions, is_positive, users),
        log_loss=log_loss,
        normalized_entropy=_ratio(log_loss, entropy),
        calibration=_ratio(_mean(probabilities), rate),
    )


def _auc(predictions: NDArray[np.float32], is_positive: NDArray[np.bool_]) -> float:
    """Twice the wins of positives over negatives are counted, in integers."""
    positives, negatives = np.sort(predictions[is_positive]), np.sort(predictions[~is_positive])
    wins = _twice_wins(positives, negatives).sum(dtype=np.int64)
    return _ratio(float(wins), 2.0 * len(positives) * len(negatives))


def _twice_wins(positives: NDArray[Any], negatives: NDArray[Any]) -> NDArray[np.int64]:
    """Of each positive: the negatives below it twice and those equal to it once. Both are ascending."""
    return np.searchsorted(negatives, positives, "left") + np.searchsorted(negatives, positives, "right")


def _gauc(
    predictions: NDArray[np.float32], is_positive: NDArray[np.bool_], users: NDArray[np.int64]
) -> float:
    distinct, numbers = np.unique(users, return_inverse=True)
    if not len(distinct):
        return math.nan
    # One number orders by user, then by prediction, so that a single sort does for all users.
    keys = numbers.astype(np.uint64) << np.uint64(32) | _ordered_bits(predictions)
    positives, negatives = np.sort(keys[is_positive]), np.sort(keys[~is_positive])
    user_of = (positives >> np.uint64(32)).astype(np.int64)
    num_positives = np.bincount(user_of, minlength=len(distinct))
    num_negatives = np.bincount(numbers[~is_positive], minlength=len(distinct))
    of_users_before = np.cumsum(num_negatives) - num_negatives
    # Keys of users before are all smaller: each counts twice as a win and is taken off again.
    wins = _twice_wins(positives, negatives) - 2 * of_users_before[user_of]
    pairs = num_positives * num_negatives
    has_both = pairs > 0
    if not has_both.any():
        return math.nan
    twice = np.bincount(user_of, weights=wins, minlength=len(distinct))[has_both]
    return float(np.average(twice / (2 * pairs[has_both]), weights=(num_positives + num_negatives)[has_both]))


def _ordered_bits(values: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Integers below 2^32 in the order of the finite values; minus zero is zero."""
    bits = (values + np.float32(0)).view(np.uint32)
    negative = bits >> np.uint32(31) == 1
    ordered: NDArray[np.uint64] = np.where(negative, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    return ordered


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
