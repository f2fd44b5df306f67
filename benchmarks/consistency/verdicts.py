"""What the study promises, and whether its figures keep it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.consistency.plan import MODES, PLAIN, SYNCHRONOUS, Mode
from benchmarks.consistency.results import Result
from benchmarks.stats import paired_ratio

__all__ = ["AUC_GAP", "SPEED_UP", "Cell", "Verdict", "cells", "verdicts"]

AUC_GAP = 0.001  # how far hybrid may be below synchronous
SPEED_UP = 2.6  # of hybrid over synchronous, where the network is slow
EXACT_SPEED = 0.9  # of exact over hybrid with the same bound
SLOW_MS = 10.0

Key = tuple[str, str, float]  # dataset, mode, delay


@dataclass(frozen=True)
class Cell:
    """The runs of one data set, mode and delay, in the order of their seeds."""

    aucs: tuple[float, ...]
    rates: tuple[float, ...]  # samples per second
    seeds: tuple[int, ...]
    ranks: int = 1

    @property
    def auc(self) -> float:
        return statistics.fmean(self.aucs)

    @property
    def auc_spread(self) -> float | None:
        """The sample standard deviation over seeds; None for one seed, which has none."""
        return statistics.stdev(self.aucs) if len(self.aucs) > 1 else None

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class Verdict:
    """One promise for one data set and mode. `kept` is None where figures are missing to judge it."""

    dataset: str
    mode: str
    promise: str
    figure: str
    kept: bool | None


def cells(results: Sequence[Result]) -> dict[Key, Cell]:
    """Results by data set, mode and delay."""
    groups: dict[Key, list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda result: result.seed):
        groups[result.dataset, result.mode, result.delay_ms].append(result)
    return {
        key: Cell(
            tuple(one.test_auc for one in group),
            tuple(one.samples_per_second for one in group),
            tuple(one.seed for one in group),
            group[0].ranks,
        )
        for key, group in groups.items()
    }


def verdicts(table: Mapping[Key, Cell]) -> list[Verdict]:
    """Every promise, in the order of data sets and modes."""
    found: list[Verdict] = []
    for dataset in dict.fromkeys(key[0] for key in table):
        delays = sorted({delay for name, mode, delay in table if name == dataset and mode != PLAIN.name})
        for mode in (mode for mode in MODES if mode.is_hybrid):
            found += _near_synchronous(table, dataset, mode, delays)
        for mode in (mode for mode in MODES if mode.is_exact):
            found += _equal(table, dataset, mode, delays)
            found += _as_fast_as_hybrid(table, dataset, mode)
        for mode in (mode for mode in MODES if mode.overlaps):
            found += _faster(table, dataset, mode)
        for mode in (SYNCHRONOUS, *(mode for mode in MODES if mode.is_hybrid)):
            found += _near_plain(table, dataset, mode, delays)
    return found


def _near_synchronous(
    table: Mapping[Key, Cell], dataset: str, mode: Mode, delays: Sequence[float]
) -> Iterator[Verdict]:
    """At the delay where it is worst. Being better than synchronous is no failure.

    Several ranks may be below by the spread of synchronous training, and no more.
    """
    gaps, limits = {}, {}
    for delay in delays:
        ours, theirs = table.get((dataset, mode.name, delay)), table.get((dataset, SYNCHRONOUS.name, delay))
        if ours is not None and theirs is not None:
            gaps[delay] = theirs.auc - ours.auc
            limits[delay] = AUC_GAP if ours.ranks == 1 else theirs.auc_spread or 0.0
    if gaps:
        worst = max(gaps, key=lambda delay: gaps[delay] - limits[delay])
        figure = f"{gaps[worst]:+.5f} below, at {worst:g} ms"
        promise = f"AUC within {limits[worst]:.2g} of synchronous"
        yield Verdict(dataset, mode.name, promise, figure, gaps[worst] <= limits[worst])


def _equal(table: Mapping[Key, Cell], dataset: str, mode: Mode, delays: Sequence[float]) -> Iterator[Verdict]:
    """The AUC of each seed, as equal parameters and rows give it."""
    gaps = []
    for delay in delays:
        ours, theirs = table.get((dataset, mode.name, delay)), table.get((dataset, SYNCHRONOUS.name, delay))
        if ours is None or theirs is None:
            continue
        by_seed = dict(zip(theirs.seeds, theirs.aucs, strict=True))
        pairs = zip(ours.seeds, ours.aucs, strict=True)
        gaps += [abs(auc - by_seed[seed]) for seed, auc in pairs if seed in by_seed]
    if gaps:
        figure = f"{max(gaps):.17g} apart at most, {len(gaps)} pairs"
        yield Verdict(dataset, mode.name, "AUC of synchronous to the last bit", figure, max(gaps) == 0)


def _as_fast_as_hybrid(table: Mapping[Key, Cell], dataset: str, mode: Mode) -> Iterator[Verdict]:
    (hybrid,) = (one for one in MODES if one.is_hybrid and one.staleness == mode.staleness)
    promise = f"at {SLOW_MS:g} ms at least {EXACT_SPEED:g} of {hybrid.name}"
    yield from _ratio(table, dataset, mode, hybrid, promise, EXACT_SPEED)


def _faster(table: Mapping[Key, Cell], dataset: str, mode: Mode) -> Iterator[Verdict]:
    promise = f"at {SLOW_MS:g} ms at least {SPEED_UP:g} times synchronous"
    yield from _ratio(table, dataset, mode, SYNCHRONOUS, promise, SPEED_UP)


def _ratio(
    table: Mapping[Key, Cell], dataset: str, mode: Mode, other: Mode, promise: str, floor: float
) -> Iterator[Verdict]:
    ours, theirs = table.get((dataset, mode.name, SLOW_MS)), table.get((dataset, other.name, SLOW_MS))
    if ours is None or theirs is None:
        yield Verdict(dataset, mode.name, promise, f"no runs at {SLOW_MS:g} ms", None)
        return
    both = sorted(set(ours.seeds) & set(theirs.seeds))  # pairs that ran one soon after the other
    if not both:
        yield Verdict(dataset, mode.name, promise, "no seed in common", None)
        return
    ratio = paired_ratio(
        [ours.rates[ours.seeds.index(seed)] for seed in both],
        [theirs.rates[theirs.seeds.index(seed)] for seed in both],
    )
    figure = f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"
    yield Verdict(dataset, mode.name, promise, figure, ratio.median >= floor)


def _near_plain(
    table: Mapping[Key, Cell], dataset: str, mode: Mode, delays: Sequence[float]
) -> Iterator[Verdict]:
    """Below plain PyTorch by no more than the spread of its own seeds, at the delay where it is worst."""
    plain = table.get((dataset, PLAIN.name, 0.0))
    ours = {delay: table[key] for delay in delays if (key := (dataset, mode.name, delay)) in table}
    if plain is None or not ours:
        return
    promise = "AUC not below plain PyTorch beyond the spread"
    worst = min(ours, key=lambda delay: ours[delay].auc)
    below, spread = plain.auc - ours[worst].auc, plain.auc_spread
    if spread is None:
        yield Verdict(dataset, mode.name, promise, f"{below:+.5f} below; one seed has no spread", None)
        return
    figure = f"{below:+.5f} below, at {worst:g} ms; spread {spread:.5f}"
    yield Verdict(dataset, mode.name, promise, figure, below <= spread)
