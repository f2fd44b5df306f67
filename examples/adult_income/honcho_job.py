"""Runs the Procfile with honcho and answers what honcho leaves open: who failed, and is anything left?

honcho ends everything when any process ends, and its exit code is that of the first; among many lines of
shutdown output the reason is easily lost. So the output is followed line by line, and its end kept for each
process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 25
STOP_GRACE_S = 15.0  # honcho itself kills what has not ended after 5 s.
LINE = re.compile(r"\d\d:\d\d:\d\d (?P<process>\S+)\s*\| ?(?P<text>.*)")
STOPPED = re.compile(r"(?P<process>\S+) stopped \(rc=(?P<code>-?\d+)\)")
JOB_VARIABLE = "PERSIA_JOB_NAME"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a job did not end well: the process that ended first, its exit code, its last lines."""

    process: str
    exit_code: int
    last_lines: list[str]


class OutputFollower:
    """Collects, from honcho's output, the tail of each process and which of them ended first."""

    def __init__(self) -> None:
        self._tails: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=TAIL_LINES))
        self.first_stopped: tuple[str, int] | None = None

    def feed(self, line: str) -> None:
        match = LINE.fullmatch(line)
        if not match:
            # honcho's own errors, such as a Procfile that it cannot parse, come without a prefix.
            self._tails["honcho"].append(line)
        elif match["process"] != "system":
            self._tails[match["process"]].append(match["text"])
        elif self.first_stopped is None and (stopped := STOPPED.fullmatch(match["text"])):
            self.first_stopped = (stopped["process"], int(stopped["code"]))

    @property
    def has_succeeded(self) -> bool:
        """Whether the process that ended first, for which honcho ends the others, has succeeded."""
        return self.first_stopped is not None and self.first_stopped[1] == 0

    def failure(self, exit_code: int) -> Failure:
        """What to tell about a job that ended with `exit_code` when it should not have ended, or not so."""
        process, code = self.first_stopped or ("honcho", exit_code)
        return Failure(process=process, exit_code=code, last_lines=list(self._tails[process]))


def run_procfile(
    procfile: Path, environment: Mapping[str, str], deadline_s: float, show: Callable[[str], None]
) -> tuple[int, OutputFollower]:
    """Runs every process of `procfile` until one ends; returns honcho's exit code and what was seen.

    `environment` must hold a PERSIA_JOB_NAME of this job alone: it is how left-over processes are
    recognised. However this function ends, also by Ctrl-C, no process of the job is left running. Past
    `deadline_s` the job is stopped.
    """
    command = [sys.executable, "-m", "honcho", "start", "-f", str(procfile)]
    # A session of its own keeps the terminal's Ctrl-C from honcho: it would race with the orderly stop below.
    honcho = subprocess.Popen(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    watchdog = threading.Timer(deadline_s, honcho.terminate)
    watchdog.daemon = True
    watchdog.start()
    try:
        return _follow(honcho, show)
    finally:
        watchdog.cancel()
        _stop(honcho, environment[JOB_VARIABLE])


def _follow(honcho: subprocess.Popen[str], show: Callable[[str], None]) -> tuple[int, OutputFollower]:
    follower = OutputFollower()
    assert honcho.stdout is not None
    for line in honcho.stdout:
        if not follower.has_succeeded:  # what others say while they are ended for it is no news
            show(line.rstrip("\n"))
        follower.feed(line.rstrip("\n"))
    return honcho.wait(), follower


def _stop(honcho: subprocess.Popen[str], job_name: str) -> None:
    """honcho first, so that the servers end in order; then whatever of the job it could not reach."""
    honcho.terminate()  # Does nothing when it has ended.
    with suppress(subprocess.TimeoutExpired):
        honcho.communicate(timeout=STOP_GRACE_S)  # Reads on: honcho breaks when it cannot write.
    for process_id in _processes_of(job_name):
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    honcho.communicate()


def _processes_of(job_name: str) -> list[int]:
    """Running processes that carry the job's name in their environment, this one excepted."""
    tag = f"{JOB_VARIABLE}={job_name}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # It ended meanwhile, or belongs to somebody else.
        if tag in variables and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
