"""`persia-launcher data-loader`: the script that sends batches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import click

from persia import env
from persia.launcher.options import option, replica_options
from persia.launcher.script import PASS_THROUGH, become, script_and_arguments, show_command


@click.command("data-loader", context_settings=PASS_THROUGH)
@replica_options
@option(
    "--linger",
    is_flag=True,
    help="After the script has succeeded, stay until SIGTERM or Ctrl-C: for supervisors, such as honcho, "
    "that end the job as soon as any of its processes ends.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FILEPATH] [SCRIPT_ARGS]...")
def command(replica_index: int, replica_size: int, linger: bool, words: tuple[str, ...]) -> None:
    """Run the data loading script FILEPATH (or PERSIA_DATALOADER_ENTRY) with SCRIPT_ARGS.

    Start --replica-size of them, each with its own --replica-index. The script sends its share of the
    batches through a DataCtx, which has both numbers.
    """
    script, arguments = script_and_arguments(words, env.data_loader_entry(), "PERSIA_DATALOADER_ENTRY")
    env.require_nats_url()  # the script would say so too, but late and with a traceback
    if replica_index >= replica_size:
        message = f"{replica_index} is not below --replica-size {replica_size}"
        raise click.BadParameter(message, param_hint="--replica-index")
    variables = {"REPLICA_INDEX": str(replica_index), "REPLICA_SIZE": str(replica_size)}
    if not linger:
        become([script, *arguments], variables)
    command_line = [sys.executable, script, *arguments]
    show_command(command_line, variables)
    sys.exit(_run_and_linger(command_line, {**os.environ, **variables}))


def _run_and_linger(command_line: list[str], environment: dict[str, str]) -> int:
    """Runs the script and waits on; a child, so that its exit handlers have run. Returns the exit code."""
    awaited = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    # Blocked, and fetched one by one: a handler could miss a signal that arrives just before a wait. The
    # script gets the mask of before, or it could not be stopped.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    is_stopped = False
    with subprocess.Popen(
        command_line,
        env=environment,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    ) as child:
        while child.poll() is None or (child.returncode == 0 and not is_stopped):
            number = signal.sigwait(awaited)
            is_stopped = is_stopped or number != signal.SIGCHLD
            # Ctrl-C reaches the child by itself, being of the same foreground group; SIGTERM is sent to us
            # alone.
            if number == signal.SIGTERM:
                child.send_signal(number)
    # As a shell says it: 128 + the number of the signal that ended the script.
    return child.returncode if child.returncode >= 0 else 128 - child.returncode
