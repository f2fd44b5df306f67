"""How long predictions take at fixed rates: python -m benchmarks.serving wide --rates 50 100 200

Without a model, all floors of serving beside what is reached: python -m benchmarks.serving

Open loop: requests are sent when they are due, whether or not the ones before are answered, and a latency
counts from that moment. A server that falls behind shows so, instead of slowing its clients down. Each rate
is measured three times: with one version all the time, while versions change as fast as they can be loaded,
and by a server that follows the packets of a training. Server and client share the machine: upper bounds of
what a client elsewhere would see, without the network.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.arguments import core, number, whole
from benchmarks.freshness import found, running
from benchmarks.own_core import own_core, preferred
from benchmarks.packet_traffic import PACKETS
from benchmarks.served_models import MODELS, prepare, requests, use_version
from benchmarks.serving_capacity import DEADLINE_S, overloaded, single, throughput
from benchmarks.serving_floors import Figure, all_figures
from persia.serving.protocol import SERVICE, message

TIMEOUT_S = 10.0


@contextlib.contextmanager
def served(folder: Path, *options: str, core: int | None) -> Iterator[tuple[str, int]]:
    """A server of the checkpoint that is warm; its address and process."""
    command = ["persia.launcher", "serve", str(folder / "model"), "--port", "0", "--poll", "0.2"]
    command += ["--embedding-config", str(folder / "embedding_config.yml"), *options]
    log = folder / "serve.log"
    with contextlib.ExitStack() as stack:
        with own_core(core, [os.getpid()]):  # the server inherits it
            process = stack.enter_context(running(log, *command))
            address = found(log, r"is served at (\S+:\d+)", process)
        asyncio.run(ask_all(address, requests(folder), 20, 2))
        yield address, process.pid


@contextlib.contextmanager
def followed(folder: Path, core: int | None) -> Iterator[tuple[str, int]]:
    """As `served`, behind a training that writes packets, on whatever core it finds."""
    shutil.rmtree(folder / PACKETS, ignore_errors=True)
    log = folder / "train.log"
    with running(log, "benchmarks.packet_traffic", str(folder)) as training:
        found(log, r"(loaded \d+ rows)", training)
        with served(folder, "--incremental-dir", str(folder / PACKETS), core=core) as server:
            yield server


async def ask_all(
    address: str, messages: list[bytes], rate: float, seconds: float
) -> tuple[list[float], list[bytes]]:
    """Milliseconds of every request from when it was due, infinity for one that failed; all replies."""
    replies: list[bytes] = []
    async with grpc.aio.insecure_channel(address) as channel:
        infer: Any = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        started = time.perf_counter() + 0.1

        async def ask(number: int) -> float:
            due = started + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            try:
                replies.append(await infer(messages[number % len(messages)], timeout=TIMEOUT_S))
            except grpc.aio.AioRpcError:
                return float("inf")
            return (time.perf_counter() - due) * 1e3

        times = await asyncio.gather(*(ask(number) for number in range(int(rate * seconds))))
    return list(times), replies


class Switching:
    """Names the other version whenever the one named before answers. In the client's own loop: no thread."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._step = folder, 1
        self.loaded = 0  # versions that have answered

    async def run(self, address: str, probe: bytes) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            infer: Any = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if _version_of(await infer(probe, timeout=TIMEOUT_S)) == str(self._step):
                        self._step, self.loaded = 3 - self._step, self.loaded + 1
                        use_version(self._folder, self._step)
                await asyncio.sleep(0.5)


def _version_of(reply: bytes) -> str:
    version: str = message("ModelInferResponse").FromString(reply).model_version
    return version


async def measure(
    what: str, address: str, messages: list[bytes], rate: float, seconds: float, switching: Switching | None
) -> str:
    """One line of the table."""
    switches = asyncio.create_task(switching.run(address, messages[0])) if switching else None
    times, replies = await ask_all(address, messages, rate, seconds)
    if switches is not None:
        switches.cancel()
    versions = [_version_of(reply) for reply in replies]
    num_switches = sum(one != other for one, other in itertools.pairwise(versions))
    all_times = np.array(times)
    answered = all_times[np.isfinite(all_times)]
    p50, p99 = np.percentile(answered, [50, 99]) if len(answered) else (np.nan, np.nan)
    return (
        f"{rate:10,.0f}  {what:12}{p50:10.2f}{p99:10.2f}{answered.max(initial=0):10.2f}"
        f"{len(all_times) - len(answered):10,}{num_switches:10,}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "model",
        nargs="?",
        choices=sorted(MODELS),
        help="adult: the example; wide: 26 slots of dim 16; without it: a table of all floors",
    )
    parser.add_argument(
        "--rates", type=number(above=0), nargs="+", default=[50, 100, 200], help="requests a second"
    )
    parser.add_argument("--seconds", type=number(above=0), default=10.0, help="of each line")
    parser.add_argument("--core", type=core, help="keep this core for the measurement (real-time priority)")
    parser.add_argument(
        "--rows", type=whole(26), default=10_000_000, help="of the wide model, all slots together"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the model is, or is written; default: a temporary one"
    )
    parser.add_argument("--prepare", action="store_true", help="write the model into --folder, and end")
    parser.add_argument("--capacity", action="store_true", help="nothing but most requests/s and overload")
    parser.add_argument(
        "--serve-options",
        type=shlex.split,
        default=[],
        metavar="'OPTION ...'",
        help="of persia-launcher serve, for the capacity: '--request-log FILE'",
    )
    parser.add_argument(
        "--all-cores",
        action="store_true",
        help="server and client on all cores, for the capacity with --serve-options '--threads 2'",
    )
    parser.add_argument(
        "--priority",
        action="store_true",
        help="prefer server and client, each on its core, for the capacity and the floors: on a machine\n"
        "with other work",
    )
    parser.add_argument(
        "--torchserve-python",
        default=sys.executable,
        help="an interpreter with torchserve, torch-model-archiver, torch and numpy, for the floors",
    )
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.model is None:
        if arguments.capacity or arguments.prepare or arguments.serve_options or arguments.core is not None:
            parser.error("name a model, as in: python -m benchmarks.serving adult --capacity")
        sys.exit(print_floors(arguments))
    if arguments.prepare and arguments.folder is None:
        parser.error("--prepare needs --folder, where the model stays")
    with contextlib.ExitStack() as stack:
        folder = arguments.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="persia-serving-")))
        if not (folder / "model").exists():
            folder.mkdir(parents=True, exist_ok=True)
            prepare(arguments.model, folder, arguments.rows)
        if arguments.prepare:
            return
        if not arguments.capacity:
            use_version(folder, 1)
            with served(folder, core=arguments.core) as server:
                states = {"one version": None, "switching": Switching(folder)}
                measure_rates(states, server, folder, arguments)
            use_version(folder, 1)
            with followed(folder, arguments.core) as server:
                measure_rates({"packets": None}, server, folder, arguments)
        use_version(folder, 1)
        cores = os.sched_getaffinity(0)
        of_server, of_client = (cores, cores) if arguments.all_cores else ({max(cores)}, {min(cores)})
        os.sched_setaffinity(0, of_server)  # the server inherits it, and computes with one thread
        with served(folder, *arguments.serve_options, core=None) as server:
            os.sched_setaffinity(0, of_client)
            with preferred([server[1], os.getpid()] if arguments.priority else []):
                measure_capacity(server, folder, arguments.seconds)


def print_floors(options: argparse.Namespace) -> int:
    """Prints a line for each floor; returns 1 if one is missed."""
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="persia-serving-")))
        missed = False
        print(f"cores: {len(os.sched_getaffinity(0))}, load average: {os.getloadavg()[0]:.1f}", flush=True)
        for figure in all_figures(
            served, folder, options.seconds, options.torchserve_python, options.priority
        ):
            print(figure, flush=True)
            missed |= isinstance(figure, Figure) and not figure.is_met
    return int(missed)


def measure_rates(
    states: Mapping[str, Switching | None], server: tuple[str, int], folder: Path, options: argparse.Namespace
) -> None:
    """Prints a line for every state and rate."""
    print("requests/s                  p50 ms    p99 ms    max ms    failed  switches")
    messages = requests(folder)
    address, pid = server
    for what, switching in states.items():
        for rate in options.rates:
            with own_core(options.core, [os.getpid(), pid]):
                line = measure(what, address, messages, rate, options.seconds, switching)
                print(asyncio.run(line), flush=True)


def measure_capacity(server: tuple[str, int], folder: Path, seconds: float) -> None:
    """Prints the most requests/s, and the answers in time at twice and ten times as many, with the floors.

    The server has one core, and the client another one if there are two.
    """
    address, pid = server
    messages = requests(folder)
    one = [single(request) for request in messages]
    for what, asked, floor in (("1 sample", one, 5000), ("as they are", messages, 1600)):
        most, by_cpu = throughput(address, pid, asked, seconds)
        print(f"most requests/s, {what}: {most:,.0f}; by processor time {by_cpu:,.0f} (floor {floor:,})")
    for times, share in ((2, 0.9), (10, 0.8)):
        in_time, refused_s = overloaded(address, messages, times * most, seconds)
        print(
            f"  {times} times as many offered, {DEADLINE_S * 1e3:.0f} ms deadlines: {in_time / most:.0%} "
            f"of them answered in time (floor {share:.0%}), a refusal takes {refused_s * 1e6:,.0f} us",
            flush=True,
        )


if __name__ == "__main__":
    main()
