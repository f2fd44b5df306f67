"""What `persia-launcher doctor` looks at. Each check returns findings and changes nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from persia import _native, env
from persia._version import __version__
from persia.config import load_embedding_config, load_global_config
from persia.errors import ConfigError, PersiaError
from persia.messaging.session import NatsSession
from persia.observability.status import find_processes, job_status, missing_replicas
from persia.security.secret import MONITOR

_NATS_WAIT_S = 3.0
_WANTED_MAX_PAYLOAD = 8 << 20  # a batch's IDs and dense features are one message
_WANTED_FILES = 4096
_LITTLE_MEMORY = 2 << 30
_GPU = Path("/dev/nvidia0")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Level(Enum):
    """How bad a finding is. Only FAIL makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """`remedy`: what to do about it."""

    level: Level
    what: str
    remedy: str = ""


_ok = partial(Finding, Level.OK)
_warn = partial(Finding, Level.WARN)
_fail = partial(Finding, Level.FAIL)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to check beside the machine."""

    global_config: str | None
    embedding_config: str | None
    nats_url: str | None
    job_name: str
    ports: tuple[int, ...] = ()


def run_checks(settings: Settings) -> Iterator[tuple[str, Finding]]:
    """Yields (topic, finding) for all checks. A check that raises is a finding, too."""
    for topic, check in _CHECKS:
        try:
            for finding in check(settings):
                yield topic, finding
        except Exception as error:  # the others must still be run
            yield topic, _fail(f"{type(error).__name__}: {error}", "please report this")


def _python(_settings: Settings) -> Iterator[Finding]:
    version = platform.python_version()
    if (3, 10) <= sys.version_info[:2] <= (3, 13):
        yield _ok(f"Python {version}")
    else:
        yield _fail(f"Python {version}", "use Python 3.10 to 3.13")


def _packages(_settings: Settings) -> Iterator[Finding]:
    # An import of a missing one would fail without a remedy.
    for name in ("numpy", "nats-py", "prometheus-client", "grpcio"):
        try:
            yield _ok(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield _fail(f"{name} is not installed", f"pip install {name}, or install persia anew")


def _compiled(_settings: Settings) -> Iterator[Finding]:
    # An editable installation keeps an old compiled module until it is built again.
    if _native.__version__ != __version__:
        built = f"the compiled module is of version {_native.__version__}, the package of {__version__}"
        yield _fail(built, "install again: pip install .")
    elif _native.simd_level == "scalar":
        yield _warn("compiled module without SIMD kernels for this processor", "it works, slowly")
    else:
        yield _ok(f"compiled module {__version__}, {_native.simd_level} kernels")


def _torch(_settings: Settings) -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield _fail(f"torch cannot be imported: {error}", "pip install torch (2.4 or later)")
        return
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    what = f"torch {torch.__version__}, built for {built_for}"
    if torch.cuda.is_available():
        yield _ok(f"{what}, {torch.cuda.device_count()} GPUs")
    elif torch.version.cuda:
        remedy = "check nvidia-smi and the driver; device_id=None trains on the CPU"
        yield _warn(f"{what}, but no GPU is usable", remedy)
    # torch for the CPU on a machine with a GPU trains without an error, only slowly.
    elif _GPU.exists():
        yield _warn(f"{what}, while there is a GPU", "install a CUDA build of torch to use it")
    else:
        yield _ok(what)


def _environment(_settings: Settings) -> Iterator[Finding]:
    getters: tuple[Callable[[], object], ...] = (
        env.get_nats_url,
        env.get_job_name,
        env.get_log_level,
        env.get_log_format,
        env.get_deadline_s,
        env.loader_silence_s,
        env.get_metrics_port,
        env.get_health_port,
        env.get_otlp_endpoint,
        env.get_otlp_trace_one_in,
        env.get_num_threads,
        env.get_wire_dtype,
        env.embedded,
        env.skip_check_data,
        env.launcher_verbose,
        env.get_advertise_host,
        env.reload_env,
    )
    # All of them: the user should not have to start the doctor once per mistake.
    num_bad = 0
    for getter in getters:
        try:
            getter()
        except ConfigError as error:
            num_bad += 1
            yield _fail(str(error), "docs/configuration.md lists the variables")
    if not num_bad:
        yield _ok("environment variables can be used")
    # urllib obeys these variables for pushes, and a proxy seldom reaches a gateway inside the cluster.
    proxies = [name for name in ("HTTP_PROXY", "http_proxy") if os.environ.get(name)]
    if proxies and env.get_metrics_gateway():
        yield _warn(
            f"{proxies[0]} is set: metrics are pushed through that proxy",
            "add the gateway's host to NO_PROXY",
        )


def _configs(settings: Settings) -> Iterator[Finding]:
    for path, load, name in (
        (settings.global_config, load_global_config, "global config"),
        (settings.embedding_config, load_embedding_config, "embedding config"),
    ):
        if path is None:
            yield _ok(f"no {name} was given to check")
            continue
        try:
            load(path)
        except PersiaError as error:
            yield _fail(str(error), "docs/configuration.md lists the keys")
        else:
            yield _ok(f"{name} {path}")


def _ports(settings: Settings) -> Iterator[Finding]:
    for port in settings.ports:
        with socket.socket() as probe:
            # As servers do: connections of a predecessor that time out do not make a port busy.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((env.get_bind_host(), port))
            except OSError as error:
                what = f"port {port} on {env.get_bind_host()} cannot be listened on: {error.strerror}"
                yield _fail(what, f"`ss -ltnp 'sport = :{port}'` tells who has it")
            else:
                yield _ok(f"port {port} is free")


def _nats(settings: Settings) -> Iterator[Finding]:
    if settings.nats_url is None:
        yield _warn(
            "PERSIA_NATS_URL is not set",
            "scripts in one process and `persia-launcher local` need none; for other jobs, start "
            "`persia-launcher nats-server` and name it",
        )
        return
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(
                NatsSession(settings.nats_url, settings.job_name, name="doctor", role=MONITOR)
            )
            session.connect(_NATS_WAIT_S)
        except PersiaError as error:
            yield _fail(str(error), "start it, correct the URL, or open the firewall")
            return
        megabytes = session.max_payload / 2**20
        # The default of 1 MiB is below a batch of common size, and a loader would fail only once such a batch
        # comes.
        if session.max_payload < _WANTED_MAX_PAYLOAD:
            yield _warn(
                f"NATS answers, but takes messages up to {megabytes:g} MiB only",
                "large batches need more: max_payload in its configuration, or `persia-launcher nats-server`",
            )
        else:
            yield _ok(f"NATS answers, messages up to {megabytes:g} MiB")
        yield from _processes(session, settings)


def _processes(session: NatsSession, settings: Settings) -> Iterator[Finding]:
    statuses = job_status(find_processes(session))
    if not statuses:
        yield _ok(f"no process of the job {settings.job_name!r} runs")
    for status in statuses:
        if status.values is None:
            yield _warn(f"{status.info}: {status.error}", "is its port reachable from here?")
        elif not status.values["ready"]:
            yield _fail(f"{status.info} is not ready: {status.values['reason']}", "see its log")
        else:
            yield _ok(f"{status.info} is ready")
    missing = missing_replicas(status.info for status in statuses)
    if missing:
        yield _warn(f"not there: {', '.join(missing)}", "start them, or see their logs")


def _limits(_settings: Settings) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _WANTED_FILES and soft != resource.RLIM_INFINITY:
        yield _warn(
            f"a process may open {soft} files (hard limit {hard})",
            "large jobs have a connection for each peer: `ulimit -n 65536`",
        )
    else:
        yield _ok(f"a process may open {soft} files")


def _memory(_settings: Settings) -> Iterator[Finding]:
    # Not every container shows /proc; a missing figure is no finding.
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
        what = f"{available / 2**30:.1f} GiB of memory available"
        if available < _LITTLE_MEMORY:
            yield _warn(what, "rows live in memory: lower `capacity`, or use more servers")
        else:
            yield _ok(what)


def _huge_pages(_settings: Settings) -> Iterator[Finding]:
    try:
        text = _THP.read_text()
    except OSError:
        yield _warn("this kernel has no transparent huge pages", "lookups cost more TLB misses")
        return
    # The kernel marks the current choice by brackets: "always [madvise] never".
    chosen = text[text.find("[") + 1 : text.find("]")]
    if chosen == "never":
        yield _warn(
            "transparent huge pages are off: random lookups miss the TLB more often",
            f"echo madvise > {_THP} (as root) on hosts of parameter servers",
        )
    else:
        yield _ok(f"transparent huge pages: {chosen}")


_CHECKS: tuple[tuple[str, Callable[[Settings], Iterator[Finding]]], ...] = (
    ("python", _python),
    ("packages", _packages),
    ("native", _compiled),
    ("torch", _torch),
    ("environment", _environment),
    ("configuration", _configs),
    ("ports", _ports),
    ("nats", _nats),
    ("limits", _limits),
    ("memory", _memory),
    ("huge pages", _huge_pages),
)
