"""The floors of serving beside what this machine reaches: python -m benchmarks.serving

The server has one core, and the client another one if there are two. A peer that is not installed is skipped
with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.freshness import found, running
from benchmarks.grpc_load import INFER, closed_loop, open_loop
from benchmarks.own_core import preferred
from benchmarks.plain_model import encode
from benchmarks.served_models import prepare, requests, use_version
from benchmarks.serving_capacity import DEADLINE_S, IN_FLIGHT, TIMEOUT_S, overloaded, single, throughput
from persia import _native
from persia.embedding import EmbeddingConfig
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Adagrad
from persia.launcher.local_cluster import LocalCluster
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.serving.protocol import message

__all__ = ["Figure", "all_figures"]

_LOADING_P99_MS, _DEAD_WORKER_RATIO, _VISIBLE_P99_S = 25.0, 2.0, 0.5
_ROUNDS, _START_S, _MOST_TURNS = 3, 60.0, 6
_IN_FLIGHT_OF_PEERS = 8  # they compute one at a time, and what is left of one turn delays the next
_ASKED_OF_WORKERS = 100.0  # requests/s
_FEW_ROWS = 260_000  # of the model whose rows are on servers
_TORCHSERVE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"

# A server of a folder, with more options; its address and process.
Served = Callable[..., contextlib.AbstractContextManager[tuple[str, int]]]


@dataclass(frozen=True)
class Figure:
    """A line of the table."""

    what: str
    value: float
    unit: str
    floor: float
    is_least: bool = True  # the floor; else the most
    note: str = ""
    untested: str = ""  # why the run says nothing about the floor

    @property
    def is_met(self) -> bool:
        if self.untested:
            return False
        return self.value >= self.floor if self.is_least else self.value <= self.floor

    def __str__(self) -> str:
        value, floor = (f"{number:,.4g}{self.unit}" for number in (self.value, self.floor))
        bound = f"{'at least' if self.is_least else 'at most'} {floor}"
        note = f"{self.untested}; {self.note}" if self.untested else self.note
        return f"{self.what:62}{value:>14}  {bound:20}{'met' if self.is_met else 'missed':8}{note}"


def all_figures(
    served: Served, folder: Path, seconds: float, torchserve_python: str, has_priority: bool = False
) -> Iterator[Figure | str]:
    """Measures them one after the other; a string says why one is left out.

    `folder` keeps the models. `has_priority`: server and client are preferred on their cores.
    """
    for name, num_rows in (("adult", 0), ("wide", 10_000_000), ("few", _FEW_ROWS)):
        if not (folder / name / "model").exists():
            (folder / name).mkdir(parents=True)
            prepare("wide" if name == "few" else name, folder / name, num_rows)
        use_version(folder / name, 1)
    cores = sorted(os.sched_getaffinity(0))

    @contextlib.contextmanager
    def apart(name: str, *options: str) -> Iterator[tuple[str, int]]:
        with _on({cores[-1]}):  # the server inherits it, and computes with one thread
            server = stack.enter_context(served(folder / name, *options, core=None))
        with _on({cores[0]}), preferred([server[1], os.getpid()] if has_priority else []):
            yield server
        stack.close()

    with contextlib.ExitStack() as stack:
        with apart("adult") as (address, pid):
            yield from _capacity(address, pid, requests(folder / "adult"), seconds)
        with apart("adult") as (address, pid):
            yield from _peers(address, folder / "adult", cores, seconds, torchserve_python)
        with apart("wide") as (address, pid):
            yield _while_loading(address, pid, folder / "wide", seconds)
        yield _dead_worker(apart, folder / "few", seconds)
        yield _freshness(seconds, "at the defaults")
        often = ("--interval-ms", "100", "--poll", "0.05")
        yield _freshness(seconds, "packets of 0.1 s", *often)


@contextlib.contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _capacity(address: str, pid: int, asked: list[bytes], seconds: float) -> Iterator[Figure]:
    one = [single(request) for request in asked]
    for what, messages, floor in (("1 sample", one, 5000), ("128 samples", asked, 1600)):
        most, by_cpu = throughput(address, pid, messages, seconds)
        note = f"{by_cpu:,.0f} by processor time"
        yield Figure(f"most requests/s, {what} of Adult", most, "/s", floor, note=note)
    for times, share in ((2, 0.9), (10, 0.8)):
        in_time, _ = overloaded(address, asked, times * most, seconds)
        what = f"{times} times as many, {DEADLINE_S * 1e3:.0f} ms deadlines: answered in time"
        yield Figure(what, in_time / most * 100, " %", share * 100)


def _while_loading(address: str, pid: int, folder: Path, seconds: float) -> Figure:
    """Versions change as fast as they can be loaded."""
    from benchmarks.serving import Switching

    messages = requests(folder)
    most, _ = throughput(address, pid, messages, seconds)
    switching = Switching(folder)
    loop = asyncio.new_event_loop()
    task = loop.create_task(switching.run(address, messages[0]))
    thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait([task]),))
    thread.start()
    try:
        times_s: list[float] = []
        asked = 0
        for _ in range(_MOST_TURNS):  # until a version is whole: its load is the last in line for the core
            times_s += open_loop(address, messages, most / 2, 2 * seconds, TIMEOUT_S).times_s
            asked += int(most / 2 * (2 * seconds))
            if switching.loaded > 1 or task.done():
                break
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
    if not task.cancelled():
        task.result()  # raises what ended the switching
    loads = max(0, switching.loaded - 1)  # it counts the version that was served before
    note = f"{most / 2:,.0f} requests/s, median {_median_ms(times_s):.1f} ms, {loads} loads"
    what, p99 = "p99 at half of the capacity while 1e7 rows load", _p99_ms(times_s)
    untested = _unanswered(asked, times_s) or ("" if loads else "no version was loaded")
    return Figure(what, p99, " ms", _LOADING_P99_MS, False, note, untested)


def _median_ms(times_s: Sequence[float]) -> float:
    return median(times_s) * 1e3 if times_s else math.nan


def _p99_ms(times_s: Sequence[float]) -> float:
    return float(np.quantile(times_s, 0.99)) * 1e3 if times_s else math.nan


def _unanswered(asked: int, times_s: Sequence[float]) -> str:
    """Why latencies of answered requests are not those of all, or nothing."""
    missing = asked - len(times_s)
    return f"{missing} of {asked} requests were not answered" if missing else ""


def _dead_worker(apart: Callable[..., Any], folder: Path, seconds: float) -> Figure:
    """The second half begins when one of two embedding workers is killed."""
    slots = str(folder / "embedding_config.yml")
    with LocalCluster(embedding_config=slots, embedding_workers=2, parameter_servers=2) as cluster:
        workers = Directory(cluster.session).wait_for(EMBEDDING_WORKER, _START_S)
        messages = requests(folder)
        cluster.join()
        _insert(workers[0].address, messages)
        options = [word for worker in workers for word in ("--embedding-worker", worker.address)]
        with apart("few", *options) as (address, _):
            healthy = open_loop(address, messages, _ASKED_OF_WORKERS, seconds, TIMEOUT_S).times_s
            cluster.kill("embedding-worker-0")
            dead = open_loop(address, messages, _ASKED_OF_WORKERS, seconds, TIMEOUT_S).times_s
    return _by_healthy(dead, healthy, int(_ASKED_OF_WORKERS * seconds))


def _by_healthy(dead_s: Sequence[float], healthy_s: Sequence[float], asked: int) -> Figure:
    """`asked`: requests of each half."""
    dead, healthy = _p99_ms(dead_s), _p99_ms(healthy_s)
    return Figure(
        "p99 with one of two embedding workers dead, by the healthy one",
        *(dead / healthy, " times", _DEAD_WORKER_RATIO, False),
        note=f"{dead:.1f} and {healthy:.1f} ms",
        untested=_unanswered(2 * asked, [*dead_s, *healthy_s]),
    )


def _insert(worker: str, messages: Sequence[bytes]) -> None:
    """Makes rows of all IDs of the requests."""
    client = _native.RemoteClient(1)
    client.set_worker(0, worker)
    client.configure(Adagrad(lr=0.1).train_config(EmbeddingConfig()))
    for request in messages:
        result = client.lookup_direct(0, _batch(request).encode_id_features(), requires_grad=True)
        gradients = [(slot.name, np.zeros((32, 16), np.float32)) for slot in result.slots]
        client.return_gradients(result.reference, gradients)


def _batch(request: bytes) -> PersiaBatch:
    asked = message("ModelInferRequest").FromString(request)
    return PersiaBatch.from_bytes(asked.inputs[0].contents.bytes_contents[0])


def _freshness(seconds: float, settings: str, *options: str) -> Figure:
    command = [sys.executable, "-m", "benchmarks.freshness", "--seconds", str(max(10.0, 2 * seconds))]
    command += options
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if (values := re.search(r"median (\S+) s, p99 (\S+) s", done.stdout)) is None:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}")
    note = f"median {values[1]} s"
    what = f"update to visible prediction, p99, {settings}"
    return Figure(what, float(values[2]), " s", _VISIBLE_P99_S, False, note)


def _peers(
    address: str, folder: Path, cores: Sequence[int], seconds: float, torchserve_python: str
) -> Iterator[Figure | str]:
    """Servers of the same model as plain TorchScript, in turns with ours, each on the same core."""
    ours, plain = requests(folder), [_plain(request) for request in requests(folder)]
    with tempfile.TemporaryDirectory(prefix="persia-peers-") as scratch, contextlib.ExitStack() as stack:
        exported = Path(scratch) / "exported"
        words = [sys.executable, "-m", "persia.launcher", "export", str(folder / "model"), str(exported)]
        words += ["--embedding-config", str(folder / "embedding_config.yml")]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        model = exported / "model.pt"
        with _on({cores[-1]}):
            log = Path(scratch) / "bare.log"
            process = stack.enter_context(running(log, "benchmarks.plain_model", str(model)))
            bare = found(log, r"is served at (\S+:\d+)", process)
        yield _beside("a bare grpc.aio server", 3, (address, ours), (bare, plain, INFER), seconds)
        try:
            with _on({cores[-1]}):
                theirs = stack.enter_context(_torchserve(Path(scratch), model, torchserve_python))
        except FileNotFoundError as missing:
            yield f"beside TorchServe: skipped, {missing}"
            return
        wrapped = [_prediction(body) for body in plain]
        yield _beside("TorchServe", 5, (address, ours), (theirs, wrapped, _TORCHSERVE), seconds)


def _plain(request: bytes) -> bytes:
    batch = _batch(request)
    slots = [(one.ids, np.diff(one.offsets.astype(np.int64))) for one in batch.id_type_features]
    return encode([one.data for one in batch.non_id_type_features], slots)


def _beside(
    name: str,
    floor: float,
    ours: tuple[str, Sequence[bytes]],
    theirs: tuple[str, Sequence[bytes], str],
    seconds: float,
) -> Figure:
    peer, messages, path = theirs
    closed_loop(peer, messages, 1, seconds, TIMEOUT_S, path)  # it warms up
    pairs = []
    for _ in range(_ROUNDS):
        mine = len(closed_loop(*ours, IN_FLIGHT, seconds, TIMEOUT_S).times_s)
        outcome = closed_loop(peer, messages, _IN_FLIGHT_OF_PEERS, seconds, TIMEOUT_S, path)
        if not outcome.times_s or outcome.failed_s:
            raise RuntimeError(f"{name}: {len(outcome.times_s)} answers, {len(outcome.failed_s)} failed")
        pairs.append((mine / len(outcome.times_s), mine, len(outcome.times_s)))
    ratio, mine, other = sorted(pairs)[_ROUNDS // 2]
    note = f"{mine / seconds:,.0f} and {other / seconds:,.0f}/s"
    return Figure(f"requests/s, 128 samples, beside {name}", ratio, " times", floor, note=note)


def _prediction(body: bytes) -> bytes:
    """The request of TorchServe's gRPC for the model `plain`: fields 1 (its name) and 3 (a map of inputs)."""
    entry = b"\x0a\x04data\x12" + _varint(len(body)) + body
    return b"\x0a\x05plain\x1a" + _varint(len(entry)) + entry


def _varint(value: int) -> bytes:
    encoded = b""
    while value >= 0x80:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


@contextlib.contextmanager
def _torchserve(folder: Path, model: Path, python: str) -> Iterator[str]:
    """Serves the model with one process; FileNotFoundError where TorchServe or Java is missing."""
    if shutil.which("java") is None:
        raise FileNotFoundError("there is no java: apt-get install openjdk-17-jre-headless")
    if subprocess.run([python, "-c", "import ts, model_archiver"], stderr=subprocess.DEVNULL).returncode:
        raise FileNotFoundError(f"{python} has no TorchServe: pip install torchserve torch-model-archiver")
    store, ports = folder / "store", [_free_port() for _ in range(5)]
    store.mkdir()
    handler = Path(__file__).with_name("plain_model.py")
    archive = [
        python,
        "-W",
        "ignore",
        "-m",
        "model_archiver.model_packaging",
        "--model-name",
        "plain",
        "--version",
        "1",
    ]
    archive += ["--serialized-file", str(model), "--handler", str(handler), "--export-path", str(store)]
    subprocess.run(archive, check=True, stdout=subprocess.DEVNULL)
    names = ("inference_address", "management_address", "metrics_address")
    lines = [f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=False)]
    lines += [f"grpc_inference_port={ports[3]}", f"grpc_management_port={ports[4]}"]
    lines += ["disable_token_authorization=true", "default_workers_per_model=1"]
    (folder / "config.properties").write_text("\n".join(lines))
    command = [python, "-m", "ts.model_server", "--foreground"]
    start = ["--start", "--ncs", "--ts-config", str(folder / "config.properties")]
    start += ["--model-store", str(store), "--models", "plain=plain.mar"]
    environment = {**os.environ, "TMPDIR": str(folder)}  # where its pid file is; its logs are in `folder`
    log = folder / "torchserve.log"
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            [*command, *start], stdout=sink, stderr=sink, env=environment, cwd=folder
        ) as process,
    ):
        try:
            found(log, r"(State change WORKER_STARTED -> WORKER_MODEL_LOADED)", process)
            yield f"127.0.0.1:{ports[3]}"
        finally:
            subprocess.run([*command, "--stop"], env=environment, cwd=folder, capture_output=True, timeout=90)
            process.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
