"""`persia-launcher data-loader`: the script that sends batches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import click

from persia import env
from persia.launcher.options import option, replica_options
from persia.launcher.script import PASS_THROUGH, become, script_and_arguments, show_command

_SIGNAL_STEP_S = 0.2


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
    """Run the data loading script FILEPATH (or PERSIA_DATALOADER_ENTRY) with SCRIPT_ARGS."""
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
    stopped = threading.Event()
    with subprocess.Popen(command_line, env=environment) as child:

        def stop(number: int, _frame: object) -> None:
            stopped.set()
            # Ctrl-C reaches the child by itself, being of the same foreground group; SIGTERM is sent to us
            # alone.
            if number == signal.SIGTERM:
                child.send_signal(number)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        # In steps, here and below: a wait without end may miss a signal that arrives just before it.
        while (exit_code := child.poll()) is None:
            time.sleep(_SIGNAL_STEP_S)
    while exit_code == 0 and not stopped.wait(_SIGNAL_STEP_S):
        pass
    # As a shell says it: 128 + the number of the signal that ended the script.
    return exit_code if exit_code >= 0 else 128 - exit_code
