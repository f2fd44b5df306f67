"""Becomes a program that reads its certificates at SIGHUP only, and sends it one when they have changed.

python -I -S reloader.py FILE... -- PROGRAM ARGUMENT...

A child process looks at the files every second, until the program has ended. SIGHUP ends a program that does
not handle it yet, so the child sends none before the program listens on a TCP port. After a minute it sends
them in any case, because /proc may not show the port. Standard library alone, so that it takes little time
and memory.
"""

import contextlib
import os
import signal
import sys
import time

_POLL_S = 1.0
_START_S = 60.0


def _stamps(files: list[str]) -> list[tuple[int, int]]:
    stamps = []
    for file in files:
        try:
            status = os.stat(file)
            # The inode, too: a secret that Kubernetes replaces is another file, perhaps of the same
            # second.
            stamps.append((status.st_mtime_ns, status.st_ino))
        except OSError:
            stamps.append((0, 0))
    return stamps


def _listens(program: int) -> bool:
    """Whether the process has a TCP socket that listens."""
    folder, owned = f"/proc/{program}/fd", set()
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                owned.add(os.readlink(f"{folder}/{name}"))
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{program}/net/{table}") as sockets:
            for fields in map(str.split, sockets):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                    return True
    return False


def _watch(files: list[str], program: int, stamps: list[tuple[int, int]]) -> None:
    is_ready, latest = False, time.monotonic() + _START_S
    # execv keeps the process ID, so the program is the parent until it ends. Then the child has another one.
    while os.getppid() == program:
        is_ready = is_ready or _listens(program) or time.monotonic() > latest
        if is_ready and (now := _stamps(files)) != stamps:
            stamps = now
            os.kill(program, signal.SIGHUP)
        time.sleep(_POLL_S)


def main(arguments: list[str]) -> None:
    separator = arguments.index("--")
    files, command = arguments[:separator], arguments[separator + 1 :]
    # Before the program reads its files: a change between the two is seen as one, and at worst reloads once
    # too often.
    program, stamps = os.getpid(), _stamps(files)
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the program decides when both end
        _watch(files, program, stamps)
        os._exit(0)
    # The parent becomes the program, so that its supervisor signals the program itself and sees its exit
    # code.
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
