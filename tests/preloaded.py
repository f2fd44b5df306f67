"""Starts the roles and scripts of test jobs as forks of a process that has imported torch and persia already.

Importing takes a role 1 s of a processor and a script with torch 3 s, of which tests of whole jobs would spend most
of their time. The processes are real: each has a process ID, a group, an environment and an end of its own. Two
things differ from a start by the command. What a library reads from the environment when it is imported comes from
that of the test run, so a process with other variables of that kind is started by the command. And /proc/PID/cmdline
names tests/preloaded_process.py. Everything but `LocalCluster` starts the command itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_ROLES = ("embedding-parameter-server", "embedding-worker", "data-loader", "nn-worker")
_READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GLIBC_", "MALLOC_", "TORCH", "PERSIA_SIMD", "LANG", "LC_")
_PR_SET_CHILD_SUBREAPER = 36

Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes] | None], Any]


class Forked:
    """Of subprocess.Popen, what a supervisor uses."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout = pid, stdout

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Preloaded:
    """The process, started by the first request. `start` has the signature of supervisor.start_process."""

    def __init__(self, start_command: Start) -> None:
        """`start_command`: starts everything else."""
        self._start_command = start_command
        self._lock = threading.Lock()
        self._env = _read_at_import(os.environ)
        self._connection: socket.socket | None = None
        self._libc = ctypes.CDLL(None)

    def start(self, command: Sequence[str], env: Mapping[str, str], stdin: IO[bytes] | None) -> Any:
        # Python, "-I", "-S", named_process.py and a program stand before the command of the role.
        role = list(command[5:])
        is_role = role[1:3] == ["-m", "persia.launcher"] and role[3] in _ROLES
        if not is_role or stdin is None or _read_at_import(env) != self._env:
            return self._start_command(command, env, stdin)
        with self._lock:
            return self._fork(role, env, stdin)

    def close(self) -> None:
        """Ends it; its forks stay."""
        if self._connection is not None:
            self._connection.close()
            self._popen.wait(30)

    def _fork(self, command: Sequence[str], env: Mapping[str, str], stdin: IO[bytes]) -> Forked:
        if self._connection is None:
            self._connection = self._begin()
        request = {"command": command, "env": dict(env), "folder": os.getcwd()}
        end, other_end = os.pipe()
        # For this moment alone: other orphans belong to init, as in production.
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], [stdin.fileno(), other_end])
            answer = self._connection.recv(20)
        finally:
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(other_end)
        return Forked(int(answer), os.fdopen(end, "rb"))

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script = Path(__file__).with_name("preloaded_process.py")
            command = [sys.executable, "-u", script, str(theirs.fileno())]
            self._popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        return ours


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    # Output of roles is never buffered: Python is started so.
    ignored = "PYTHONUNBUFFERED"
    return {n: v for n, v in env.items() if n.startswith(_READ_AT_IMPORT) and n != ignored}
