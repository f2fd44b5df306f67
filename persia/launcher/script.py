"""What nn-worker and data-loader share: becoming the Python process that runs the user's script."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from persia import env
from persia.errors import InvalidArgumentError, NotFoundError

# For click: what stands behind FILEPATH is the script's, also when it looks like an option of ours.
PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def script_and_arguments(words: Sequence[str], entry: str | None, variable: str) -> tuple[str, list[str]]:
    """Splits the words after our options into the script and its arguments.

    The first word is the script. Without words, or when the first one starts with "-", it is `entry`, the
    value of the environment variable called `variable`, and all words are its arguments.
    """
    if words and not words[0].startswith("-"):
        return checked_script(words[0]), list(words[1:])
    if entry is None:
        raise InvalidArgumentError(f"no script: name it on the command line, or in {variable}")
    return checked_script(entry), list(words)


def checked_script(path: str) -> str:
    """`path`, which must be a file: better said here than by an interpreter started later."""
    if not Path(path).is_file():
        raise NotFoundError(f"script {path!r} is not a file (working directory {os.getcwd()})")
    return path


def become(arguments: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Replaces this process by Python with `arguments`; `variables` are added to the environment."""
    command = [sys.executable, *arguments]
    show_command(command, variables)
    # exec drops what Python has buffered.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, {**os.environ, **variables})


def show_command(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Prints what is about to run, as for a shell, when PERSIA_LAUNCHER_VERBOSE=1."""
    if env.launcher_verbose():
        words = [f"{name}={value}" for name, value in variables.items()]
        print("+", *words, shlex.join(command), file=sys.stderr)
