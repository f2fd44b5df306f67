"""Imports what roles and scripts of a job import, and becomes such a process in each of its forks.

Run by tests/preloaded.py with the number of a socket. A request has the command, the environment, the working
directory and the descriptors 0 and 1 of a new process; the answer is its process ID. The new process is adopted
by the nearest ancestor that asked for orphans (PR_SET_CHILD_SUBREAPER): the process that has sent the request.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
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
    "pydantic.dataclasses",
    "sympy",
    "torch._dynamo",
)


class _Exec(BaseException):
    """In place of os.execve: another Python would have to import everything again."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__("a fork of tests/preloaded.py becomes another program")
        self.command, self.env = list(command), dict(env)


def main() -> None:
    """Serves requests until the other end is closed; in a fork, runs what was asked for."""
    for name in _MODULES:
        importlib.import_module(name)
    # Collections in a fork would write to, and so copy, the memory of all these modules.
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"forks of a process with {len(threads)} threads may hang"
    connection = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, _flags, _address = socket.recv_fds(connection, 1 << 20, 2)
        if not message:
            return
        request = json.loads(message)
        pid = _fork_orphan()
        if pid == 0:
            connection.close()
            break
        connection.send(b"%d" % pid)
        for descriptor in descriptors:
            os.close(descriptor)
    # As named_process.py does.
    os.write(descriptors[0], b"+%d\n" % os.getpid())
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[1], 2)
    os.closerange(3, 64)
    os.chdir(request["folder"])
    _end(_run(request["command"], request["env"]))


def _fork_orphan() -> int:
    """Its process ID, which also is that of its group; 0 in the new process."""
    end, other_end = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            return 0
        os.setpgid(pid, pid)
        os.write(other_end, b"%d" % pid)
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(end, 20))
    os.close(end)
    os.close(other_end)
    return pid


def _run(command: list[str], env: dict[str, str]) -> int:
    """The exit code."""
    os.execve = _exec
    # Python seeds its own generators anew in a fork, numpy does not.
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    while True:
        try:
            _become_main(command, env)
            return 0
        except _Exec as request:
            command, env = request.command, request.env
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            print(end.code, file=sys.stderr)
            return 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1


def _end(exit_code: int) -> NoReturn:
    """As Python ends, but for the memory of its modules: to free it, all of it would be copied first."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _exec(_path: str, command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    raise _Exec(command, env)


def _become_main(command: list[str], env: dict[str, str]) -> None:
    """`command`: Python, perhaps "-u", and a script or "-m" and a module."""
    os.environ.clear()
    os.environ.update(env)
    _python, *words = command
    if words[0] == "-u":
        del words[0]
    module: Any = types.ModuleType("__main__")
    if words[0] == "-m":
        name = words[1]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        assert spec is not None and spec.origin is not None
        module.__spec__, module.__package__ = spec, spec.parent
        path, folder, arguments = spec.origin, os.getcwd(), words[2:]
    else:
        path, folder, arguments = words[0], str(Path(words[0]).resolve().parent), words[1:]
    module.__file__ = path
    sys.argv = [path, *arguments]
    sys.path[0] = folder
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)


if __name__ == "__main__":
    main()
