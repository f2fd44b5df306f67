"""Imports what processes of tests import, and becomes such a process in each of its forks.

Run by tests/preloaded.py with the number of a socket. A request has a command, an environment, a folder and
the descriptors 0 to 2; the answer is the process ID. The new process is adopted by the nearest ancestor
that asks for orphans (PR_SET_CHILD_SUBREAPER), which is the process that has sent the request.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from preloaded import Preloaded, command_of  # beside this script

_MODULES = (
    "numpy.random",
    "persia.helper",
    "persia.launcher.data_loader",
    "persia.launcher.embedding_servers",
    "persia.launcher.nn_worker",
    "persia.launcher.torchrun",
    "persia.prelude",
    "persia.roles.embedding_worker",
    "persia.roles.parameter_server",
    "persia.train",
    "persia_k8s.cli",
    "pydantic.dataclasses",
    "sympy",
    "torch._dynamo",
)
_BY_CTRL_C = 256  # no exit code
_execve = os.execve


class _Exec(BaseException):
    """In place of os.execve: another Python would have to import everything again."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__("the process becomes another script")
        self.words, self.env = list(words), dict(env)


def main() -> None:
    """Answers requests until the other end is closed. In a fork, runs what was asked for."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):  # persia_k8s is optional
            importlib.import_module(name)
    # Collections in a fork would write to, and so copy, the memory of all these modules.
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(connection: socket.socket) -> None:
    """Also in a fork that starts processes of this kind itself, such as torchrun."""
    # A fork of a process with threads may hang. With OMP_NUM_THREADS=1 numpy has none.
    if len(os.listdir("/proc/self/task")) > 1:
        return
    # Ctrl-C is for the processes of tests. This one ends with the process that asks.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, descriptors, _flags, _address = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            return
        request = json.loads(message)
        pid = _fork_orphan(request)
        if pid == 0:
            signal.signal(signal.SIGINT, handler)
            _end(_run(request, descriptors))
        connection.send(b"%d" % pid)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_orphan(request: Mapping[str, Any]) -> int:
    """Its process ID; 0 in the new process."""
    end, other_end = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                if request["session"]:
                    os.setsid()
                elif request["group"] == 0:
                    os.setpgid(0, 0)
                os.write(other_end, b"%d" % os.getpid())
                return 0
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(other_end)
    pid = os.read(end, 20)
    os.close(end)
    os.waitpid(between, 0)
    if not pid:
        raise OSError(f"no process could be made for {request['command']}")
    return int(pid)


def _run(request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """The exit code; _BY_CTRL_C: that of Python after a KeyboardInterrupt."""
    if request["is_named"]:  # as named_process.py does
        with contextlib.suppress(OSError):
            os.write(descriptors[0], b"+%d\n" % os.getpid())
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptors[0])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 256)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for kind, limits in request["limits"].items():
        resource.setrlimit(int(kind), limits)
    os.execve, os.execv = _exec, lambda path, words: _exec(path, words, os.environ)
    # Python seeds its own generators anew in a fork, numpy does not.
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    command, env = request["command"], request["env"]
    while True:
        try:
            _become_main(command, env)
            return 0
        except _Exec as other:
            command, env = other.words, other.env
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return (end.code or 0) & 0xFF
            print(end.code, file=sys.stderr)
            return 1
        except BaseException as error:
            sys.excepthook(*sys.exc_info())
            return _BY_CTRL_C if isinstance(error, KeyboardInterrupt) else 1


def _exec(path: str, words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    command = command_of(list(words)) if path == sys.executable else None
    if command is None:
        _execve(path, words, env)
    raise _Exec(command, env)


def _end(exit_code: int) -> NoReturn:
    """As Python ends, but for the memory of its modules: to free it, all of it would be copied first."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            exit_code = exit_code or 120  # as Python does
    if exit_code == _BY_CTRL_C:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(exit_code)


def _become_main(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Runs a module or a script as Python does."""
    os.environ.clear()
    os.environ.update(env)
    name, *arguments = command
    module: Any = types.ModuleType("__main__")
    if name.endswith(".py"):
        path = name
        sys.path[0] = str(Path(name).resolve().parent)
    else:
        sys.path[0] = os.getcwd()
        spec: Any = importlib.util.find_spec(name)
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        module.__spec__, module.__package__ = spec, spec.parent
        path = spec.origin
    if name == "persia.launcher.torchrun" or command[:2] == ["persia.launcher", "local"]:
        _preload_for_children()
    _show([sys.executable, *(() if path == name else ("-m",)), *command])
    module.__file__ = path
    sys.argv = [path, *arguments]
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)


def _show(words: Sequence[str]) -> None:
    """Writes the words of the command to where /proc/PID/cmdline has them."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if start == 0:  # not to be seen here
        return
    line = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


def _preload_for_children() -> None:
    """What this process starts is forked, too, from a copy of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _serve(theirs)
        os._exit(0)
    theirs.close()
    Preloaded(ours).install()


if __name__ == "__main__":
    main()
