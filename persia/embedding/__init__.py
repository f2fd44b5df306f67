"""Hyper-parameters of embeddings that hold for a whole job, and the packages that look them up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from persia.embedding.checks import checked_integer, checked_number
from persia.embedding.initializers import Initializer, Uniform
from persia.errors import InvalidArgumentError
from persia.utils import get_seed

__all__ = ["EmbeddingConfig", "get_default_embedding_config"]


@dataclass(frozen=True)
class EmbeddingConfig:
    """How embedding rows begin and how far they may go.

    Args:
        emb_initialization: (lower, upper): initial values are uniform in [lower, upper); or an object of
            `persia.embedding.initializers`.
        admit_probability: share of new IDs that get a row, in [0, 1]; decided by the ID, so an ID that
            was refused stays refused. Refused IDs read as zeros and their gradients are dropped.
        admit_after: a new ID gets a row in the training batch that has it for the admit_after-th time, 1 to
            255; until then it is treated as a refused one. Counted in bounded memory: rarely early, and late
            only after very many other IDs.
        weight_bound: every element is clamped to [-weight_bound, weight_bound] after an update; 0
            switches it off.
        time_to_live_sec: a row goes when no training batch has had its ID for so many seconds; None keeps
            rows. It begins anew with the next batch that has the ID, and for all rows when a checkpoint is
            loaded.
        min_norm: rows whose embedding has a smaller Euclidean norm go when a checkpoint is written; 0
            keeps all.
        seed: seed of the initial values; None takes that of `persia.utils.setup_seed`, or 0.

    Raises:
        InvalidArgumentError: a value out of its range; the message names it.
        InvalidTypeError: no number at all.
    """

    emb_initialization: tuple[float, float] | Initializer = (-0.01, 0.01)
    admit_probability: float = 1.0
    weight_bound: float = 10.0
    seed: int | None = None
    admit_after: int = 1
    time_to_live_sec: float | None = None
    min_norm: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.emb_initialization, Initializer):
            lower, upper = _bounds(self.emb_initialization)
            if not (math.isfinite(lower) and math.isfinite(upper) and lower <= upper):
                raise InvalidArgumentError(
                    f"emb_initialization={self.emb_initialization!r} must be finite with lower <= upper"
                )
        if not 0.0 <= checked_number("admit_probability", self.admit_probability) <= 1.0:
            raise InvalidArgumentError(f"admit_probability={self.admit_probability!r} must be in [0, 1]")
        # Asked for finiteness beside the range: each comparison with NaN is false.
        bound = checked_number("weight_bound", self.weight_bound)
        if not (math.isfinite(bound) and bound >= 0):
            raise InvalidArgumentError(f"weight_bound={self.weight_bound!r} must be >= 0 (0: no bound)")
        if self.seed is not None and not 0 <= checked_integer("seed", self.seed) < 2**64:
            raise InvalidArgumentError(f"seed={self.seed!r} must be in [0, 2**64)")

        if not 1 <= checked_integer("admit_after", self.admit_after) <= 255:
            raise InvalidArgumentError(f"admit_after={self.admit_after!r} must be in [1, 255]")
        if self.time_to_live_sec is not None:
            seconds = checked_number("time_to_live_sec", self.time_to_live_sec)
            if not (math.isfinite(seconds) and seconds > 0):
                raise InvalidArgumentError(
                    f"time_to_live_sec={self.time_to_live_sec!r} must be above 0, or None to keep rows"
                )
        min_norm = checked_number("min_norm", self.min_norm)
        if not (math.isfinite(min_norm) and min_norm >= 0):
            raise InvalidArgumentError(f"min_norm={self.min_norm!r} must be >= 0 (0: keeps all rows)")

    @property
    def initializer(self) -> Initializer:
        """`emb_initialization` as an object."""
        if isinstance(self.emb_initialization, Initializer):
            return self.emb_initialization
        return Uniform(*_bounds(self.emb_initialization))

    @property
    def effective_seed(self) -> int:
        """The seed that is used now."""
        if self.seed is not None:
            return self.seed
        # Read now and not when this object was made: scripts may call `setup_seed` after it.
        return (get_seed() or 0) % 2**64


def _bounds(emb_initialization: object) -> tuple[float, float]:
    try:
        lower, upper = emb_initialization  # type: ignore[misc]
        return float(lower), float(upper)  # type: ignore[has-type]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"emb_initialization={emb_initialization!r} must be two numbers (lower, upper)"
        ) from error


def get_default_embedding_config() -> EmbeddingConfig:
    """`EmbeddingConfig()`."""
    return EmbeddingConfig()
