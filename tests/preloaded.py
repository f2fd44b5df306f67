"""Starts persia's commands and scripts of tests as forks of a process that has imported torch and persia.

Importing takes a role 1 s of a processor and a script with torch 3 s, which would be most of the time that
tests of whole jobs take. The processes are real: each has a process ID, descriptors, an environment, limits
and an end of its own. A fork differs from what the command starts in that more modules are imported than it
needs, what libraries read from the environment when they are imported comes from that of the test run (a
process with other variables of that kind is started as always), and /proc/PID/environ is that of the test
run. Commands in shells, such as those of the documentation, and `python -c` are started as always, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("benchmarks", "persia", "persia_k8s")
_READ_AT_IMPORT = (
    *("PYTHON", "LD_", "OMP_", "OPENBLAS_", "MKL_", "KMP_", "GOMP_", "GLIBC_", "MALLOC_", "TORCH", "ATEN_"),
    *("PERSIA_SIMD", "LANG", "LC_", "TZ"),
)
# Output is never buffered: the process runs as `python -u`. torch's compiler and scikit-learn set the others,
# when a test imports them.
_IGNORED = ("PYTHONUNBUFFERED", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")
_BEFORE_NAMED = ["-I", "-S", "named_process.py"]
_PR_SET_CHILD_SUBREAPER = 36
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

start_as_always: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Preloaded:
    """The process with the modules, started by the first request, and the requests to it."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        """`connection`: to the process, if it runs already."""
        self._connection = connection
        self._popen: subprocess.Popen[bytes] | None = None
        self._has_failed = False  # all is started as always from now on
        self._lock = threading.Lock()
        self._pid, self._env = os.getpid(), dict(os.environ)
        self._libc = ctypes.CDLL(None)

    def install(self) -> None:
        """`subprocess.Popen` starts its processes by forks from now on, where it can."""
        preloaded = self

        def execute_child(popen: Any, *arguments: Any) -> None:
            if not preloaded._fork(popen, *arguments):
                start_as_always(popen, *arguments)

        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]

    def close(self) -> None:
        """Undoes `install`. Processes that run stay."""
        subprocess.Popen._execute_child = start_as_always  # type: ignore[attr-defined]
        if self._connection is not None:
            self._connection.close()
        if self._popen is not None:
            self._popen.wait(30)

    def _fork(self, popen: Any, args: Any, executable: Any, *rest: Any) -> bool:
        """False: it is started as always. `rest` has the order of CPython 3.10 to 3.13."""
        preexec_fn, close_fds, pass_fds, cwd, env, _startupinfo, _flags, shell = rest[:8]
        pipes, how = rest[8:14], rest[14:]
        p2cread, _p2cwrite, _c2pread, c2pwrite, _errread, errwrite = pipes
        restore_signals, *who, new_session = how[:6]
        group = how[6] if len(how) > 6 else -1
        # A fork of this process is no ancestor of what it would ask for, and could not wait for it.
        is_elsewhere = self._has_failed or os.getpid() != self._pid
        is_special = (
            preexec_fn or pass_fds or executable or shell or who != [None, None, None, -1] or group > 0
        )
        if is_elsewhere or is_special or not close_fds or not restore_signals:
            return False
        words = [args] if isinstance(args, (str, bytes, os.PathLike)) else args
        words = [os.fsdecode(word) for word in words]
        command = command_of(words)
        env = {
            os.fsdecode(name): os.fsdecode(value)
            for name, value in (os.environ if env is None else env).items()
        }
        folder = os.path.abspath(os.fsdecode(cwd or "."))
        if command is None or _read_at_import(env) != _read_at_import(self._env) or not os.path.isdir(folder):
            return False
        request = {
            "command": command,
            "is_named": _is_named(words),
            "env": env,
            "folder": folder,
            "session": bool(new_session),
            "group": group,
            "limits": {number: resource.getrlimit(number) for number in _LIMITS},
            "umask": int(re.findall(r"Umask:\s*(\d+)", Path("/proc/self/status").read_text())[0], 8),
            "cores": sorted(os.sched_getaffinity(0)),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        descriptors = [fd if fd != -1 else own for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        with self._lock:
            pid = self._request(request, descriptors)
        if pid is None:
            return False
        popen.pid, popen._child_created = pid, True
        popen._close_pipe_fds(*pipes)
        return True

    def _request(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int | None:
        """The process ID; None: the process with the modules has ended, or cannot be forked."""
        # For this moment alone: other orphans belong to init, as in production.
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        answer = b""
        try:
            if self._connection is None:
                self._connection = self._begin()
            with contextlib.suppress(OSError):
                socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
                answer = self._connection.recv(20)
        finally:
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            self._has_failed = True
            self._connection.close()  # it ends, if it hangs no longer
            print(
                "tests/preloaded_process.py has ended or hangs: processes of tests are started as always",
                file=sys.stderr,
            )
            return None
        return int(answer)

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script = Path(__file__).with_name("preloaded_process.py")
            room = "-" * 8000  # for the command lines of the forks
            # Importing takes long on a busy machine.
            ours.settimeout(240)
            self._popen = subprocess.Popen(
                [sys.executable, "-u", str(script), str(theirs.fileno()), room],
                env=self._env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return ours


def command_of(words: list[str]) -> list[str] | None:
    """The module or the path of a script, and its arguments. None: it is started as always."""
    if _is_named(words):
        words = words[5:]  # after the path of the program
    if words and os.path.basename(words[0]) == "persia-launcher":
        return ["persia.launcher", *words[1:]]
    if words[:1] != [sys.executable]:
        return None
    words = words[2:] if words[1:2] == ["-u"] else words[1:]
    if len(words) > 1 and words[0] == "-m" and words[1].partition(".")[0] in _PACKAGES:
        return words[1:]
    return words if words and words[0].endswith(".py") else None


def _is_named(words: Sequence[str]) -> bool:
    return [*map(os.path.basename, words[1:4])] == _BEFORE_NAMED


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {n: v for n, v in env.items() if n.startswith(_READ_AT_IMPORT) and n not in _IGNORED}
