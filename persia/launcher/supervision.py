"""Runs the processes of a whole job to their end, restarts what may be restarted, and judges how it ended.

For `persia-launcher local` and `ray submit`, which differ in where processes run.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import click

from persia.launcher.nats_server import NATS
from persia.launcher.options import option
from persia.launcher.restarts import Restarts, how_it_ended, partner_of, restarts_alone
from persia.launcher.supervisor import OutputSink, ProcessGroup, ProcessSpec, SupervisedProcess
from persia.messaging.subjects import NN_WORKER

_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_magenta")
_NUM_SHOWN_LINES = 40  # a traceback, and what other ranks say when they are ended for it
# Its configuration when it starts, and that it was told to end. The limit of messages is ours, and is meant:
# a batch is one message. Passwords are long and random, so that a hash would protect them no better.
_NATS_CHATTER = ("[INF]", "Maximum payloads over", "Plaintext passwords detected")

_WAIT_S = 0.5  # how often the main thread looks up, for signals
# A training script may leave its loop before the data ends, which is an error for loaders only: how long it
# has after that to succeed.
_LEAVE_S = 5.0


max_restarts = option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    help="Restarts in all. A data loader, an embedding worker or NATS that dies is started again alone; when "
    "a rank or a parameter server without a standby dies, the whole job is. A script with "
    "TrainCtx(recovery=...) continues after its newest checkpoint.",
)


class _Stopped(BaseException):
    """A stop signal. Not an Exception: nothing on the way may take it for a failure of the job."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


class JobProcesses(ABC):
    """What a job consists of."""

    @abstractmethod
    def specs(self) -> list[ProcessSpec]:
        """What to start for the job to begin, or to begin again, in this order."""

    def is_expendable(self, _name: str) -> bool:
        """Whether the job continues without this process, whichever way it ended."""
        return False

    def is_bound_to(self, _ended: SupervisedProcess) -> bool:
        """Whether the others cannot continue with another start of this one, whatever its role."""
        return False

    def cancel(self) -> None:  # noqa: B027 - there may be nothing
        """Gives up what changes the processes at the moment: all of them have been killed."""


# Puts on the stack what is to end with the job. Returns where processes run, and which.
Start = Callable[[contextlib.ExitStack, OutputSink], tuple[ProcessGroup[Any], JobProcesses]]


def run_job(start: Start, max_restarts: int) -> int:
    """Runs a job to its end and returns the exit code for the shell; all processes have ended then.

    0: all ranks have succeeded. Otherwise the code of the process that failed first, or 128 + the signal's
    number.
    """
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        with contextlib.ExitStack() as stack:
            try:
                # One printer for all processes: lines of two processes must not mix.
                failed = _supervise(*start(stack, _Printer()), max_restarts)
            except _Stopped:
                click.secho("stopping ...", err=True)  # leaving the processes takes a moment
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


def _supervise(
    supervisor: ProcessGroup[Any], processes: JobProcesses, max_restarts: int
) -> SupervisedProcess | None:
    """Runs the processes until training has ended; returns the one that failed for good, if one did."""
    restarts = Restarts(max_restarts)
    for spec in processes.specs():
        supervisor.start(spec)
    while (failed := _await_end(supervisor, restarts, processes)) is not None and not restarts.exhausted:
        # At once, as a crash would: what the others still do is lost anyway, and must not meet what follows.
        supervisor.kill([process.name for process in supervisor.processes if process.name != NATS])
        processes.cancel()
        restarts.add(failed, processes.specs(), tell)
    if restarts.count:
        click.secho(restarts.summary(), err=True)
    return failed


def tell(text: str) -> None:
    """Says what becomes of the job, in its terminal."""
    click.secho(text, fg="yellow", err=True)


def _await_end(
    supervisor: ProcessGroup[Any], restarts: Restarts, processes: JobProcesses
) -> SupervisedProcess | None:
    """Restarts what is due, and what may be restarted alone, until training has ended.

    Returns the process that failed otherwise, if one did.
    """
    failed_loader: SupervisedProcess | None = None
    give_up_at = math.inf
    while time.monotonic() < give_up_at:
        for spec in restarts.take_due():
            supervisor.start(spec)
        ended: SupervisedProcess | None = supervisor.next_ended(min(_WAIT_S, restarts.next_due_s))
        # One of those that were restarted together, or will be.
        if ended is None or ended not in supervisor.processes or restarts.is_waiting(ended.name):
            continue
        if processes.is_expendable(ended.name):
            continue
        others = {process.name: process for process in supervisor.processes}
        partner = others.get(partner_of(ended.name))
        if restarts_alone(ended, partner) and not processes.is_bound_to(ended):
            if not restarts.exhausted:
                restarts.add(ended, [ended.spec], tell)
                continue
            if partner is not None:
                tell(f"{ended.name} {how_it_ended(ended)}; {partner.name} continues without a standby")
                continue
        if ended.name.startswith(NN_WORKER) and ended.exit_code == 0:
            if all(one.exit_code == 0 for name, one in others.items() if name.startswith(NN_WORKER)):
                return None
            continue
        # A loader may have sent everything. A server has no reason to end before the training.
        if not ended.name.startswith("data-loader-"):
            return failed_loader or ended
        # The script may be about to leave its loop successfully; only if it does not, the loader is the
        # cause.
        # One whose batches were not taken says that a rank has failed, which is about to end.
        if ended.exit_code not in (0, os.EX_TEMPFAIL) and failed_loader is None:
            failed_loader, give_up_at = ended, time.monotonic() + _LEAVE_S
    return failed_loader


def _report(failed: SupervisedProcess) -> int:
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
