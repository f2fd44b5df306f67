"""What the study runs: every mode, delay, data set and seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["DATASETS", "MODES", "PLAIN", "SYNCHRONOUS", "Mode", "Run", "planned"]

DATASETS = ("adult", "kuairand")
_UNBOUNDED = "unbounded"


@dataclass(frozen=True)
class Mode:
    """One arrangement: `consistency` as `TrainCtx` takes it, None for plain PyTorch."""

    name: str
    consistency: str | None
    staleness: str = ""  # the scripts' EMBEDDING_STALENESS; "" where the mode has its own bound

    @property
    def is_hybrid(self) -> bool:
        return self.consistency == "hybrid"

    @property
    def is_exact(self) -> bool:
        return self.consistency == "exact"

    @property
    def overlaps(self) -> bool:
        """Whether lookups may run ahead: one batch in flight is one step after the other."""
        return (self.is_hybrid or self.is_exact) and self.staleness != "1"


PLAIN = Mode("plain PyTorch", None)
SYNCHRONOUS = Mode("synchronous", "synchronous")
MODES = (
    SYNCHRONOUS,
    *(Mode(f"hybrid {bound}", "hybrid", bound) for bound in ("1", "8", "64", _UNBOUNDED)),
    *(Mode(f"exact {bound}", "exact", bound) for bound in ("8", "64")),
    Mode("asynchronous", "asynchronous"),
)


@dataclass(frozen=True)
class Run:
    """One training: `delay_ms` is added to the round trip between NN worker and embedding worker.

    Each of `ranks` has its part of the samples of a step, so steps are those of one rank.
    """

    dataset: str
    mode: Mode
    delay_ms: float
    seed: int
    ranks: int = 1

    @property
    def name(self) -> str:
        """Also the name of its file."""
        mode = self.mode.name.lower().replace(" ", "-")
        ranks = "" if self.ranks == 1 else f".{self.ranks}ranks"
        return f"{self.dataset}.{mode}.{self.delay_ms:g}ms.seed{self.seed}{ranks}"


def planned(
    datasets: Sequence[str],
    modes: Sequence[Mode],
    delays_ms: Sequence[float],
    num_seeds: int,
    ranks: int = 1,
) -> Iterator[Run]:
    """Modes change fastest: what is compared ran one after the other, while the machine was the same."""
    for dataset in datasets:
        for seed in range(num_seeds):
            if ranks == 1:  # as plain PyTorch has
                yield Run(dataset, PLAIN, 0.0, seed)
            for delay_ms in delays_ms:
                for mode in modes:
                    yield Run(dataset, mode, delay_ms, seed, ranks)
