"""Starts persia's commands and the scripts of tests as forks of a process that has imported torch and persia.

Importing takes a role 1 s of a processor and a script with torch 3 s, which would be most of the time that
tests of whole jobs take. The processes are real: each has a process ID, descriptors, an environment and an
end of its own. They differ in one thing from those that the command starts: what a library reads from the
environment when it is imported comes from that of the test run, so processes with other variables of that
kind are started as always. Commands in shells, such as those of the documentation, and `python -c` are
started as always, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("benchmarks", "persia", "persia_k8s")
_READ_AT_IMPORT = (
    *("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GLIBC_", "MALLOC_", "TORCH", "PERSIA_SIMD", "LANG", "LC_"),
)
_BEFORE_NAMED = ["-I", "-S", "named_process.py"]
_PR_SET_CHILD_SUBREAPER = 36


class Preloaded:
    """The process with the modules, started by the first request, and the requests to it."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        """`connection`: to the process, if it runs already."""
        self._connection = connection
        self._lock = threading.Lock()
        self._env = _read_at_import(os.environ)
        self._libc = ctypes.CDLL(None)
        self._start_as_always: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def install(self) -> None:
        """`subprocess.Popen` starts its processes by forks from now on, where it can."""
        preloaded = self

        def execute_child(popen: Any, *arguments: Any) -> None:
            if not preloaded._fork(popen, *arguments):
                preloaded._start_as_always(popen, *arguments)

        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]

    def close(self) -> None:
        """Undoes `install`. Processes that run stay."""
        subprocess.Popen._execute_child = self._start_as_always  # type: ignore[attr-defined]
        if self._connection is not None:
            self._connection.close()
            self._popen.wait(30)

    def _fork(self, popen: Any, args: Any, _executable: Any, *rest: Any) -> bool:
        """False: it is no process of this kind. `rest` has the order of CPython 3.10 to 3.13."""
        preexec_fn, _close_fds, pass_fds, cwd, env, _startupinfo, _flags, shell = rest[:8]
        pipes, how = rest[8:14], rest[14:]
        p2cread, _p2cwrite, _c2pread, c2pwrite, _errread, errwrite = pipes
        _restore_signals, gid, gids, uid, umask, new_session, *group = how
        if (
            preexec_fn
            or pass_fds
            or shell
            or isinstance(args, (str, bytes))
            or (gid, gids, uid, umask) != _AS_HERE
        ):
            return False
        env = dict(os.environ if env is None else env)
        command = command_of([os.fspath(word) for word in args])
        if command is None or _read_at_import(env) != self._env:
            return False
        request = {
            "command": command,
            "is_named": [*map(os.path.basename, args[1:4])] == _BEFORE_NAMED,
            "env": env,
            "folder": os.path.abspath(cwd or "."),
            "session": bool(new_session),
            "group": group[0] if group else -1,
            "limits": {number: resource.getrlimit(number) for number in _LIMITS},
        }
        descriptors = [fd if fd != -1 else own for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        with self._lock:
            popen.pid = self._request(request, descriptors)
        popen._child_created = True
        popen._close_pipe_fds(*pipes)
        return True

    def _request(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        if self._connection is None:
            self._connection = self._begin()
        # For this moment alone: other orphans belong to init, as in production.
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
            return int(self._connection.recv(20))
        finally:
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script = Path(__file__).with_name("preloaded_process.py")
            room = "-" * 8000  # for the command lines of the forks
            command = [sys.executable, "-u", str(script), str(theirs.fileno()), room]
            number = [theirs.fileno()]
            self._popen = subprocess.Popen(command, pass_fds=number, stdin=subprocess.DEVNULL)
        return ours


_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_AS_HERE = (None, None, None, -1)  # group, groups, user, mask of a new process


def command_of(words: list[str]) -> list[str] | None:
    """The module or the path of a script, and its arguments. None: it is started as always."""
    if [*map(os.path.basename, words[1:4])] == _BEFORE_NAMED:
        words = words[5:]  # after the path of the program
    if os.path.basename(words[0]) == "persia-launcher":
        return ["persia.launcher", *words[1:]]
    if words[0] != sys.executable:
        return None
    words = words[2:] if words[1] == "-u" else words[1:]
    if words[0] == "-m" and words[1].partition(".")[0] in _PACKAGES:
        return words[1:]
    return words if words[0].endswith(".py") else None


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    # Output is never buffered: the process runs as `python -u`.
    ignored = "PYTHONUNBUFFERED"
    return {n: v for n, v in env.items() if n.startswith(_READ_AT_IMPORT) and n != ignored}
