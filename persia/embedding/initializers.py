"""Initial values of embedding rows: settings here, values on the parameter servers.

A row's values are a function of (seed, ID, element) alone: not of order, threads, servers or processor. Every
argument is checked on construction, by name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from persia import _native
from persia.embedding.checks import checked_number

__all__ = [
    "Constant",
    "Initializer",
    "Normal",
    "Ones",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "Zeros",
]


@dataclass(frozen=True)
class Initializer:
    """How the values of a new row come about. For `EmbeddingConfig.emb_initialization`, or a slot's own."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for name, value in self._given().items():
            # The binding would take a bool for a number.
            checked_number(name, value)
        _native.TrainConfig(optimizer="sgd", lr=1.0, initializer=self.settings())  # knows the ranges

    def settings(self) -> dict[str, Any]:
        """As `embedding_config.yml` has it: the name and the arguments."""
        return {"name": self.name, **self._given()}

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # None is a default that depends on the other settings: the engine computes it.
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform in [lower, upper)."""

    name = "uniform"
    lower: float = -0.01
    upper: float = 0.01


@dataclass(frozen=True)
class Normal(Initializer):
    """Normally distributed."""

    name = "normal"
    mean: float = 0.0
    std: float = 0.01


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normally distributed and restricted to [lower, upper], by default two `std` from the mean.

    Values are drawn from the restricted distribution; none is moved to a bound.
    """

    name = "truncated_normal"
    mean: float = 0.0
    std: float = 0.01
    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True)
class Constant(Initializer):
    """All values alike."""

    name = "constant"
    value: float


@dataclass(frozen=True)
class Zeros(Initializer):
    """`Constant(0)`."""

    name = "zeros"


@dataclass(frozen=True)
class Ones(Initializer):
    """`Constant(1)`."""

    name = "ones"


@dataclass(frozen=True)
class XavierUniform(Initializer):
    """Uniform in [-gain * sqrt(3 / dim), gain * sqrt(3 / dim)): variance gain^2 / dim.

    Glorot's rule with dim for both fans: a table of IDs has no number of rows.
    """

    name = "xavier_uniform"
    gain: float = 1.0


@dataclass(frozen=True)
class XavierNormal(Initializer):
    """Normally distributed with standard deviation gain / sqrt(dim)."""

    name = "xavier_normal"
    gain: float = 1.0
