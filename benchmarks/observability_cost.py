"""What metrics and traces cost a step: `python -m benchmarks.observability_cost`.

One process holds a parameter server, an embedding worker and a rank's client, which talk over real sockets,
so that measuring can be turned on and off for all of them at once, and their processor time told together.
That is what is compared: it depends less than the clock on what else the machine does. A step is what a rank
does with a batch: lookup, a small tower (256-128) forward and backward, its optimizer, and the return of
gradients. `--no-model` leaves the tower out, so that what measuring adds weighs as much as it can.

Two answers, which have to agree:

*Paired*: turns of a few steps in the order off, on, on, off, all four over the same batches, so that drift
and the batches' differences cancel. Each such block gives one ratio; told are the median of the ratios and
its 95 % confidence interval (order statistics: no distribution is assumed). "off" against itself is noise.

*Counted*: how many measurements a step makes, times what one costs, measured alone in long loops. It has next
to no noise, but misses what a measurement does to the caches of others.

On a machine that others use: `chrt -f 5 taskset -c 1 python -m benchmarks.observability_cost --blocks 120`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import click
import numpy as np
import torch
from prometheus_client import CollectorRegistry, Metric

from benchmarks.stats import median_interval
from persia import _native
from persia.observability.exposition import Families, text
from persia.observability.phases import (
    BACKWARD,
    DENSE_STEP,
    FORWARD,
    HAND_IN,
    LOOKUP_IN_STEP,
    QUEUES,
    STEP_PHASES,
    TO_DEVICE,
    WAIT_FOR_BATCH,
    Phase,
)
from persia.observability.sources import EmbeddingWorkerSource, NnWorkerSource, ParameterServerSource, Source
from persia.pipeline.backend import SlotGradients
from persia.pipeline.batch import embedding_tensors, leaf_gradients

_SLOTS = 26
_DIM = 16
_ROWS = 1_000_000
_HOST = "127.0.0.1"
_TRACE_SPANS = 10_000
_IN_PYTHON = (*STEP_PHASES, *QUEUES)
_WARM_STEPS = 1
_WARM_UP = 100  # steps: past the first 64 batches, of which all IDs are counted
_SCRAPE_INTERVAL_S = 10.0

Entering: TypeAlias = Callable[[Phase], AbstractContextManager[object]]


class Tower:
    """The dense part of a step, in the phases that `TrainCtx` has."""

    def __init__(self) -> None:
        sizes = (_SLOTS * _DIM, 256, 128, 1)
        layers = [torch.nn.Linear(inner, outer) for inner, outer in pairwise(sizes)]
        self._model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def gradients(self, found: _native.LookupResult, phase: Entering) -> SlotGradients:
        with phase(TO_DEVICE):
            inputs = embedding_tensors(found, requires_grad=True)
        with phase(FORWARD):
            loss = self._model(torch.cat(inputs.tensors, dim=1)).square().mean()
        with phase(BACKWARD):
            loss.backward()
        with phase(HAND_IN):
            gradients = leaf_gradients(inputs.leaves)
        with phase(DENSE_STEP):
            self._optimizer.step()
            self._optimizer.zero_grad()
        return gradients


class NoTower:
    """The same phases around nothing."""

    def __init__(self, batch_size: int) -> None:
        self._gradient = np.full((batch_size, _DIM), 1e-3, np.float32)

    def gradients(self, found: _native.LookupResult, phase: Entering) -> SlotGradients:
        for one in (TO_DEVICE, FORWARD, BACKWARD, HAND_IN, DENSE_STEP):
            with phase(one):
                pass
        return [(slot.name, self._gradient) for slot in found.slots]


class Cluster:
    """All roles in this process."""

    def __init__(self, batch_size: int, *, with_model: bool = False) -> None:
        names = [f"f{slot}" for slot in range(_SLOTS)]
        self._server = _native.ParameterServer(
            replica_index=0, replica_size=1, capacity=_ROWS * _SLOTS, num_internal_shards=16
        )
        slots = [_native.SlotConfig(name=name, dim=_DIM, group=i) for i, name in enumerate(names)]
        self._worker = _native.EmbeddingWorker(slots=slots, feature_index_prefix_bit=8, num_servers=1)
        self._worker.set_server(0, f"{_HOST}:{self._server.start(_HOST, 0)}")
        self._client = _native.RemoteClient(1)
        self._client.set_worker(0, f"{_HOST}:{self._worker.start(_HOST, 0)}")
        self._client.configure(_native.TrainConfig(optimizer="adagrad", lr=0.01))
        self._tower = Tower() if with_model else NoTower(batch_size)
        rng = np.random.default_rng(0)
        offsets = np.arange(batch_size + 1, dtype=np.uint32)
        self._messages = []
        for _ in range(48):
            ids = (rng.zipf(1.2, (_SLOTS, batch_size)) % _ROWS).astype(np.uint64)
            features = [(name, ids[slot], offsets) for slot, name in enumerate(names)]
            self._messages.append(_native.encode_id_features(batch_size, features))
        self._num_steps = 0

    def rewind(self, num_steps: int) -> None:
        """The next steps have the batches of the last `num_steps` ones."""
        self._num_steps -= num_steps

    @property
    def sources(self) -> list[Source]:
        return [
            ParameterServerSource(self._server, 0, 1),
            EmbeddingWorkerSource(self._worker, 0, 1),
            NnWorkerSource(self._client, 0, 1, counters=dict, in_flight=lambda: 0),
        ]

    def step(self, *, phases: bool) -> None:
        message = self._messages[self._num_steps % len(self._messages)]
        self._num_steps += 1
        with _native.TracedBatch(self._num_steps):
            result = self._client.lookup_direct(0, message, requires_grad=True)
        batch = self._num_steps, result.reference.reference
        if phases:
            for queue in QUEUES:
                now = time.monotonic_ns()
                queue.record(now, now, result.reference.reference, self._num_steps)

        def entering(phase: Phase) -> AbstractContextManager[object]:
            return phase.of(*batch) if phases else nullcontext()

        for phase in (WAIT_FOR_BATCH, LOOKUP_IN_STEP):
            with entering(phase):
                pass
        gradients = self._tower.gradients(result, entering)
        with _native.TracedBatch(self._num_steps):
            self._client.return_gradients(result.reference, gradients)

    def num_measured(self) -> int:
        """Durations recorded so far by native code of all roles."""
        durations = [*self._server.durations().values(), *self._worker.durations().values()]
        durations += self._client.durations().values()
        durations += [one["calls"] for one in (*self._client.channels(), *self._worker.channels())]
        return sum(sum(counts) for counts, _, _ in durations)

    def close(self) -> None:
        self._worker.stop()
        self._server.stop()


class Scraper:
    """What Prometheus does to all three, without the socket."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        families = Families(role="all", replica="0")
        for source in self._sources:
            source.add_metrics(families)
        return families.collect()


@dataclass(frozen=True)
class Mode:
    name: str
    measured: bool
    traced: bool = False


_OFF = Mode("off", measured=False)
_MODES = (_OFF, Mode("metrics", measured=True), Mode("metrics and trace", measured=True, traced=True))


def turn_s(cluster: Cluster, mode: Mode, steps: int) -> float:
    """Processor seconds of `steps` steps."""
    _native.enable_durations(mode.measured)
    if mode.traced:
        _native.start_trace(_TRACE_SPANS)
    for _ in range(_WARM_STEPS):  # what the mode before has left in caches
        cluster.step(phases=mode.measured)
    begin = time.process_time()
    for _ in range(steps):
        cluster.step(phases=mode.measured)
    used = time.process_time() - begin
    if mode.traced:
        _native.stop_trace()  # not counted: done once a recording, whatever its length
    return used


def block_ratio(cluster: Cluster, mode: Mode, steps: int) -> tuple[float, float]:
    """Processor time of `mode` by that of "off" over the same batches, and a step's seconds when off."""
    used = {True: 0.0, False: 0.0}
    for number, on in enumerate((False, True, True, False)):
        if number:
            cluster.rewind(steps + _WARM_STEPS)
        used[on] += turn_s(cluster, mode if on else _OFF, steps)
    return used[True] / used[False], used[False] / (2 * steps)


def call_ns(function: Callable[[], object], calls: int = 20_000, rounds: int = 15) -> float:
    """Of one call, at its quickest: what disturbs only adds. The loop is taken off."""

    def loop_s(body: Callable[[], object]) -> float:
        begin = time.process_time()
        for _ in range(calls):
            body()
        return time.process_time() - begin

    empty = min(loop_s(lambda: None) for _ in range(rounds))
    return 1e9 * (min(loop_s(function) for _ in range(rounds)) - empty) / calls


def counted_ns(cluster: Cluster, steps: int = 80) -> dict[str, float]:
    """Nanoseconds a step spends in measuring, by kind. Counting distinct IDs is not in it: see
    native/bench/metrics_bench.cc."""
    _native.enable_durations(True)
    before = cluster.num_measured()
    for _ in range(steps):
        cluster.step(phases=True)
    measured = (cluster.num_measured() - before) / steps
    stats, phase = _native.DurationStats("cost"), Phase("cost")
    recorded = call_ns(lambda: stats.record(1_000_000, 1_002_000))
    _native.enable_durations(False)
    # Less the call from Python, which native code has not; the clock with it: an upper bound.
    record = recorded - call_ns(lambda: stats.record(1_000_000, 1_002_000)) + 2 * call_ns(time.monotonic_ns)
    _native.enable_durations(True)

    def enter_and_exit() -> None:
        with phase.of(1, 1):
            pass

    return {
        f"{measured:.0f} native measurements": measured * record,
        # A queue costs less: the clock is read twice and no context entered.
        f"{len(_IN_PYTHON)} phases in Python": len(_IN_PYTHON) * call_ns(enter_and_exit),
    }


def scrape_s(cluster: Cluster) -> float:
    """Processor seconds of one scrape of all three roles."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scraper(cluster.sources))
    times = []
    for _ in range(20):
        begin = time.process_time()
        text(registry)
        times.append(time.process_time() - begin)
    return statistics.median(times)


@click.command()
@click.option("--batch-size", type=click.IntRange(1), default=1024, show_default=True)
@click.option(
    "--blocks", type=click.IntRange(1), default=200, show_default=True, help="Of 4 turns, of each mode."
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Of a turn. IDs are counted as distinct in one batch of 32: with 16, each block has one such batch.",
)
@click.option(
    "--model/--no-model", default=True, show_default=True, help="A small tower in the step, or nothing."
)
def main(batch_size: int, blocks: int, steps: int, model: bool) -> None:
    """Measure what observing costs a step."""
    torch.set_num_threads(1)
    cluster = Cluster(batch_size, with_model=model)
    for _ in range(_WARM_UP):
        cluster.step(phases=True)
    ratios: dict[str, list[float]] = {mode.name: [] for mode in _MODES}
    step_s = []
    for _ in range(blocks):
        for mode in _MODES:
            ratio, off_s = block_ratio(cluster, mode, steps)
            ratios[mode.name].append(ratio)
            step_s.append(off_s)
    off_ns = 1e9 * statistics.median(step_s)
    click.echo(
        f"{_SLOTS} slots of dim {_DIM}, {batch_size} samples; {off_ns / 1e6:.3f} ms of processors a step"
    )
    click.echo(f"paired, {blocks} blocks of 4 turns of {steps} steps: median [95 % interval]")
    for name, own in ratios.items():
        median, low, high = (100 * (value - 1) for value in median_interval(own))
        click.echo(f"  {name:<26} {median:+6.2f} %  [{low:+.2f}, {high:+.2f}]")
    click.echo("counted")
    for what, ns in counted_ns(cluster).items():
        click.echo(f"  {what:<26} {ns / 1e3:6.2f} us a step = {100 * ns / off_ns:.2f} %")
    share = scrape_s(cluster) / _SCRAPE_INTERVAL_S
    click.echo(f"  a scrape every {_SCRAPE_INTERVAL_S:.0f} s       {100 * share:17.2f} % of one processor")
    cluster.close()


if __name__ == "__main__":
    main()
