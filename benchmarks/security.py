"""What a flood of strangers costs a job that trains: `python -m benchmarks.security`.

A real job of five processes trains as fast as it can. A sixth process connects to every port of the job from
several addresses, without credentials. It keeps thousands of connections: silent ones, halves of a request,
garbage, and one byte a second. What the job closes is opened again. Turns with and without this flood follow
one another, so that what slows the machine slows both.

*Batches a second* are slowed by the work of the sixth process, too, where it shares cores with the job. So
the processor time of the job's own processes is counted as well: for a batch, and for each stranger.

The sixth process leaves real-time scheduling and the cores of the job, for a machine that others use:
`taskset -c 1 chrt -r 5 python -m benchmarks.security`.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import select
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import click

from benchmarks.attacks.intruder import frame, garbage
from benchmarks.attacks.job import AttackedJob, attacked_job
from benchmarks.stats import Ratio, paired_ratio

_KINDS = ("silent", "half", "garbage", "slow")
_HALF = {
    "rpc": frame(17, claimed=1 << 20),
    "broker": b'CONNECT {"verbose"',
    "status": b"GET /metrics HTTP/1.",
}
_SETTLE_S = 2.0
_STEP_S = 0.02
_FLOOR = 0.95  # of the batches a second without strangers
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Limits:
    """Of a flood: connections at once, new ones a second, addresses that they come from."""

    connections: int
    rate: float
    hosts: int


class Flood:
    """Connections of strangers to all ports of a job."""

    def __init__(self, ports: Mapping[str, str], limits: Limits) -> None:
        self.counts: Counter[str] = Counter()
        self._limits = limits
        self._ports = [(name, *address.rpartition(":")[::2]) for name, address in ports.items()]
        self._sockets: dict[int, socket.socket] = {}
        self._slow: set[int] = set()
        self._poll = select.epoll()
        self._generator = random.Random(1)

    def run(self, over: Event, opened: Any) -> None:
        begin = byte_at = time.monotonic()
        while not over.is_set():
            now = time.monotonic()
            wanted = min(
                int((now - begin) * self._limits.rate) - self.counts.total(),
                self._limits.connections - len(self._sockets),
            )
            for _ in range(wanted):
                self._open()
            if now > byte_at + 1:
                byte_at = now
                for number in tuple(self._slow):
                    self._send(number, b"P")
            self._drop_closed()
            opened.value = self.counts.total()

    def _open(self) -> None:
        count = self.counts.total()
        name, host, port = self._ports[count % len(self._ports)]
        kind = _KINDS[count // len(self._ports) % len(_KINDS)]
        self.counts[name] += 1
        connection = socket.socket()
        connection.setblocking(False)
        connection.bind((f"127.0.0.{2 + count % self._limits.hosts}", 0))
        if connection.connect_ex((host, int(port))) not in (0, errno.EINPROGRESS):
            return connection.close()
        number = connection.fileno()
        self._sockets[number] = connection
        self._poll.register(number, select.EPOLLRDHUP)
        if kind == "slow":
            self._slow.add(number)
        elif kind == "garbage":
            self._send(number, garbage(self._generator))
        elif kind == "half":
            self._send(number, _HALF.get(name.partition(" ")[0], _HALF["rpc"]))

    def _send(self, number: int, content: bytes) -> None:
        try:
            self._sockets[number].send(content)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                self._close(number)

    def _drop_closed(self) -> None:
        for number, _ in self._poll.poll(_STEP_S):
            self._close(number)

    def _close(self, number: int) -> None:
        self._slow.discard(number)
        self._sockets.pop(number).close()  # which takes it out of epoll


def _flood(ports: Mapping[str, str], limits: Limits, over: Event, opened: Any) -> None:
    """The sixth process."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flood = Flood(ports, limits)
    flood.run(over, opened)


@dataclass(frozen=True)
class Turn:
    """Of the job: batches a second, processor seconds a batch by process, strangers a batch."""

    rate: float
    cpu_s: dict[str, float]
    strangers: float

    @property
    def sum_s(self) -> float:
        return sum(self.cpu_s.values())


def processor_s(job: AttackedJob) -> dict[str, float]:
    """Used so far, by each process of the job with its children."""
    used = {process.pid: 0.0 for process in job.cluster.processes}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[2]) in used:  # the process group
            used[int(fields[2])] += (int(fields[11]) + int(fields[12])) / _TICKS
    return {process.name: used[process.pid] for process in job.cluster.processes}


def turn(job: AttackedJob, seconds: float, opened: Callable[[], int] = lambda: 0) -> Turn:
    job.require_alive()
    step, used, before, begin = job.step, processor_s(job), opened(), time.monotonic()
    time.sleep(seconds)
    batches, after, took_s = job.step - step, processor_s(job), time.monotonic() - begin
    strangers = opened() - before
    job.require_alive()
    if batches < 1:
        raise click.ClickException(f"no batch was trained in {took_s:.0f} s")
    cpu_s = {name: (after[name] - used[name]) / batches for name in used}
    return Turn(batches / took_s, cpu_s, strangers / batches)


def flooded_turn(job: AttackedJob, seconds: float, limits: Limits) -> Turn:
    context = multiprocessing.get_context("spawn")
    over, opened = context.Event(), context.Value("Q", 0)
    strangers = context.Process(target=_flood, args=(job.ports, limits, over, opened))
    strangers.start()
    try:
        time.sleep(_SETTLE_S + limits.connections / limits.rate)
        measured = turn(job, seconds, lambda: int(opened.value))
        if not strangers.is_alive() or not measured.strangers:
            raise click.ClickException("the process of the strangers has failed: nothing was measured")
        return measured
    finally:
        over.set()
        strangers.join(60)
        strangers.kill()


def report(quiet: list[Turn], flooded: list[Turn]) -> None:
    rate = paired_ratio([one.rate for one in flooded], [one.rate for one in quiet])
    cpu = paired_ratio([one.sum_s for one in flooded], [one.sum_s for one in quiet])
    for name in quiet[0].cpu_s:
        before, after = (1e3 * sum(t.cpu_s[name] for t in turns) / len(turns) for turns in (quiet, flooded))
        click.echo(f"  {name:<32} {before:7.3f} -> {after:7.3f} ms of processors a batch")
    verdict = "pass" if rate.median >= _FLOOR else "miss"
    click.echo(f"of those alone: batches a second {_shown(rate)}, floor {_FLOOR}: {verdict}")
    click.echo(f"                processor time a batch {_shown(cpu)}")
    more_s = [after.sum_s - before.sum_s for before, after in zip(quiet, flooded, strict=True)]
    strangers = statistics.median(turn.strangers for turn in flooded)
    click.echo(
        f"{strangers * statistics.median(turn.rate for turn in flooded):.0f} strangers a second, "
        f"{strangers:.1f} a batch, {1e6 * statistics.median(more_s) / strangers:.0f} us of processors each"
    )


def _shown(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} [{ratio.least:.3f}, {ratio.most:.3f}]"


@click.command(help=__doc__)
@click.option("--connections", type=click.IntRange(1), default=3000, show_default=True, help="At once.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=500.0,
    show_default=True,
    help="New connections a second, at most.",
)
@click.option("--hosts", type=click.IntRange(1, 250), default=8, show_default=True, help="Their addresses.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Pairs of turns.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=8.0, show_default=True)
def main(connections: int, rate: float, hosts: int, rounds: int, seconds: float) -> None:
    limits = Limits(connections, rate, hosts)
    with tempfile.TemporaryDirectory() as folder, attacked_job(Path(folder) / "report", pace_s=0.0) as job:
        quiet, flooded = [], []
        for _ in range(rounds):
            quiet.append(turn(job, seconds))
            flooded.append(flooded_turn(job, seconds, limits))
            click.echo(f"  {quiet[-1].rate:8.1f} batches/s alone, {flooded[-1].rate:8.1f} among strangers")
        report(quiet, flooded)


if __name__ == "__main__":
    main()
