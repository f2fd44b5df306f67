"""`persia-launcher local`: runs a whole job on this machine and judges how it ended."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from persia.launcher import options
from persia.launcher.job_description import JobDescription, description_options
from persia.launcher.nats_server import NATS, start_local_nats
from persia.launcher.options import option
from persia.launcher.process_specs import ProcessSpecs, job_environment
from persia.launcher.restarts import Restarts, how_it_ended, partner_of, restarts_alone
from persia.launcher.supervisor import ManagedProcess, ProcessSpec, Supervisor
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER

if TYPE_CHECKING:
    from persia.launcher.resizing import Resizer

_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_magenta")
_NUM_SHOWN_LINES = 40  # a traceback, and what other ranks say when they are ended for it
# Its configuration when it starts, and that it was told to end. The limit of messages is ours, and is meant:
# a batch is one message. Passwords are long and random, so that a hash would protect them no better.
_NATS_CHATTER = ("[INF]", "Maximum payloads over", "Plaintext passwords detected")

_WAIT_S = 0.5  # how often the main thread looks up, for signals
# A training script may leave its loop before the data ends, which is an error for loaders only: how long it
# has after that to succeed.
_LEAVE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LocalJob(JobDescription):
    """What `persia-launcher local` was asked for."""

    nats_url: str | None
    max_restarts: int = 0


@click.command("local")
@description_options
@options.sign_key
@options.verify_key
@option(
    "--nats-url",
    metavar="URL",
    help="Use this NATS server instead of starting one. PERSIA_NATS_URL is not read: a job of its own needs "
    "no server that others use. A job without --job-name gets a name of its own there.",
)
@option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    help="Restarts in all. A data loader, an embedding worker or NATS that dies is started again alone; when "
    "a rank or a parameter server without a standby dies, the whole job is. A script with "
    "TrainCtx(recovery=...) continues after its newest checkpoint.",
)
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def command(**given: Any) -> None:
    """Run a whole job on this machine: NATS, servers, data loaders and training, on free ports.

    \b
      persia-launcher local --nn-worker train.py --data-loader data_loader.py \\
          --embedding-config embedding_config.yml --parameter-servers 2 -- --epochs 3

    Ends when the training script has ended, with its exit code. When any process fails more often than
    --max-restarts allows, or on Ctrl-C, all of them are stopped. SCRIPT_ARGS, best after --, go to the
    training script.
    """
    source = click.get_current_context().get_parameter_source("job_name")
    if given["nats_url"] and source is ParameterSource.DEFAULT:
        # Another job without a name may use the server.
        given["job_name"] = f"local-{secrets.token_hex(4)}"
    sys.exit(_run(LocalJob(**given)))


class _Stopped(BaseException):
    """A stop signal. Not an Exception: nothing on the way may take it for a failure of the job."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


def _run(job: LocalJob) -> int:
    """Runs `job` to its end and returns the exit code for the shell; all processes have ended then.

    0: all ranks have succeeded. Otherwise the code of the process that failed first, or 128 + the signal's
    number.
    """
    # Before the handlers: an error here is a plain exit, with nothing to stop.
    job.check()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    # One for all processes: lines of two processes must not mix.
    printer = _Printer()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="persia-") as folder,
            Supervisor(printer) as supervisor,
            contextlib.ExitStack() as stack,
        ):
            try:
                processes = _start(job, supervisor, Path(folder), stack)
                failed = _supervise(supervisor, processes, job.max_restarts)
            except _Stopped:
                click.secho("stopping ...", err=True)  # leaving the supervisor takes a moment
                raise
    except _Stopped as stopped:
        click.secho("stopped", err=True)
        return stopped.exit_code
    return 0 if failed is None else _report(failed)


def _stop(number: int, _frame: object) -> None:
    # Once is enough: a second Ctrl-C must not interrupt the orderly end, which is bounded.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise _Stopped(number)


@dataclass(frozen=True)
class _Processes:
    """What a job consists of, but for NATS."""

    servers: Resizer  # its parameter servers, whose number may change
    others: list[ProcessSpec]

    def specs(self) -> list[ProcessSpec]:
        """In the order of their start."""
        return [*self.servers.specs(), *self.others]


def _start(job: LocalJob, supervisor: Supervisor, folder: Path, stack: contextlib.ExitStack) -> _Processes:
    """Starts NATS; returns the other processes. On `stack`: what ends before them."""
    from persia.launcher.resizing import Resizer, ResizeService  # not for --help
    from persia.messaging.session import NatsSession

    nats_url = job.nats_url or start_local_nats(supervisor, folder)
    watched_as = f"PERSIA_NATS_URL={nats_url} PERSIA_JOB_NAME={job.job_name}"
    click.secho(f"watch it: {watched_as} persia-launcher status", err=True)
    # Scripts that need the slots, too, find them there.
    extra = {"PERSIA_EMBEDDING_CONFIG": str(Path(job.embedding_config).resolve())}
    env = job_environment(nats_url=nats_url, job_name=job.job_name, extra=extra)
    specs = ProcessSpecs(env=env, global_config=job.global_config, embedding_config=job.embedding_config)
    made = [
        specs.server(EMBEDDING_WORKER, index, job.embedding_workers) for index in range(job.embedding_workers)
    ]
    if job.has_standbys:
        role, replicas = EMBEDDING_PARAMETER_SERVER, job.parameter_servers
        made += [specs.server(role, index, replicas, standby=True) for index in range(replicas)]
    if job.data_loader is not None:
        for index in range(job.data_loaders):
            made.append(specs.data_loader(job.data_loader, job.loader_args, index, job.data_loaders, {}))
    made.append(specs.nn_worker(job.nn_worker, job.script_args, job.nproc_per_node, {}))
    session = stack.enter_context(NatsSession(nats_url, job.job_name, name="launcher"))
    servers = Resizer(supervisor, session, specs, job.parameter_servers)
    stack.callback(ResizeService(servers, session, _tell).close)
    return _Processes(servers, made)


def _supervise(supervisor: Supervisor, processes: _Processes, max_restarts: int) -> ManagedProcess | None:
    """Runs the processes until training has ended; returns the one that failed for good, if one did."""
    restarts = Restarts(max_restarts)
    for spec in processes.specs():
        supervisor.start(spec)
    servers = processes.servers
    while (failed := _await_end(supervisor, restarts, servers)) is not None and not restarts.exhausted:
        # At once, as a crash would: what the others still do is lost anyway, and must not meet what follows.
        supervisor.kill([process.name for process in supervisor.processes if process.name != NATS])
        servers.cancel()
        restarts.add(failed, processes.specs(), _tell)
    if restarts.count:
        click.secho(restarts.summary(), err=True)
    return failed


def _tell(text: str) -> None:
    click.secho(text, fg="yellow", err=True)


def _await_end(supervisor: Supervisor, restarts: Restarts, servers: Resizer) -> ManagedProcess | None:
    """Restarts what is due, and what may be restarted alone, until training has ended.

    Returns the process that failed otherwise, if one did.
    """
    failed_loader, give_up_at = None, math.inf
    while time.monotonic() < give_up_at:
        for spec in restarts.take_due():
            supervisor.start(spec)
        ended = supervisor.next_ended(min(_WAIT_S, restarts.next_due_s))
        # One of those that were restarted together, or will be.
        if ended is None or ended not in supervisor.processes or restarts.is_waiting(ended.name):
            continue
        if servers.is_expendable(ended.name):  # of a change of their number
            continue
        others = {process.name: process for process in supervisor.processes}
        partner = others.get(partner_of(ended.name))
        if restarts_alone(ended, partner):
            if not restarts.exhausted:
                restarts.add(ended, [ended.spec], _tell)
                continue
            if partner is not None:
                _tell(f"{ended.name} {how_it_ended(ended)}; {partner.name} continues without a standby")
                continue
        if ended.name == NN_WORKER and ended.exit_code == 0:
            return None
        # A loader may have sent everything. A server has no reason to end before the training.
        if not ended.name.startswith("data-loader-"):
            return failed_loader or ended
        # The script may be about to leave its loop successfully; only if it does not, the loader is the
        # cause.
        # One whose batches were not taken says that a rank has failed, which is about to end.
        if ended.exit_code not in (0, os.EX_TEMPFAIL) and failed_loader is None:
            failed_loader, give_up_at = ended, time.monotonic() + _LEAVE_S
    return failed_loader


def _report(failed: ManagedProcess) -> int:
    code = failed.exit_code or 0
    click.secho(
        f"{failed.name} {how_it_ended(failed)}; the job was stopped. Its last lines:", fg="red", err=True
    )
    for line in failed.output.splitlines()[-_NUM_SHOWN_LINES:]:
        click.echo(f"    {line}", err=True)
    if code == 0:
        return 1  # a server that ends without an error while it is needed has failed, too
    return code if code > 0 else 128 - code


class _Printer:
    """Writes the processes' lines, each behind the name of its process, coloured on a terminal.

    All of a failed process' last lines are shown at the end, NATS' chatter included.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._colors: dict[str, str] = {}

    def __call__(self, name: str, line: str) -> None:
        if name == NATS and any(text in line for text in _NATS_CHATTER):
            return
        # The reader of our output may close it. The job's processes must not block on full pipes then.
        with self._lock, contextlib.suppress(BrokenPipeError):
            color = self._colors.setdefault(name, _COLORS[len(self._colors) % len(_COLORS)])
            click.echo(click.style(f"{name:<28} | ", fg=color) + line)
