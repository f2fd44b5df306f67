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
_execve = os.execve


class _Exec(BaseException):
    """In place of os.execve: another Python would have to import everything again."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__("the process becomes another script")
        self.words, self.env = list(words), dict(env)


def main() -> None:
    """Answers requests until the other end is closed. In a fork, runs what was asked for."""
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # for tests.preloaded
    for name in _MODULES:
        with contextlib.suppress(ImportError):  # persia_k8s is not there, or a package of it
            importlib.import_module(name)
    # Collections in a fork would write to, and so copy, the memory of all these modules.
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(connection: socket.socket) -> None:
    """Also in a fork that starts processes of this kind itself, such as torchrun."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"forks of a process with {len(threads)} threads may hang"
    while True:
        message, descriptors, _flags, _address = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            return
        request = json.loads(message)
        pid = _fork_orphan(request)
        if pid == 0:
            _end(_run(request, descriptors))
        connection.send(b"%d" % pid)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_orphan(request: Mapping[str, Any]) -> int:
    """Its process ID; 0 in the new process."""
    end, other_end = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork() != 0:
            os._exit(0)
        if request["session"]:
            os.setsid()
        elif request["group"] >= 0:
            os.setpgid(0, request["group"])
        os.write(other_end, b"%d" % os.getpid())
        return 0
    pid = int(os.read(end, 20))
    os.waitpid(between, 0)
    os.close(end)
    os.close(other_end)
    return pid


def _run(request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """The exit code; negative: the signal that ends it."""
    if request["is_named"]:  # as named_process.py does
        os.write(descriptors[0], b"+%d\n" % os.getpid())
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptors[0])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 256)
    os.chdir(request["folder"])
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
                return end.code or 0
            print(end.code, file=sys.stderr)
            return 1
        except BaseException as error:
            sys.excepthook(*sys.exc_info())
            return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _exec(path: str, words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    from tests.preloaded import command_of

    command = command_of(list(words)) if path == sys.executable else None
    if command is None:
        _execve(path, words, env)
    raise _Exec(command, env)


def _end(exit_code: int) -> NoReturn:
    """As Python ends, but for the memory of its modules: to free it, all of it would be copied first."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
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
    line = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


def _preload_for_children() -> None:
    """What this process starts is forked, too, from a copy of it."""
    from tests.preloaded import Preloaded

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _serve(theirs)
        os._exit(0)
    theirs.close()
    Preloaded(ours).install()


if __name__ == "__main__":
    main()
