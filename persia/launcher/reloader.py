"""Becomes a program that reads its certificates at SIGHUP only, and sends it one when they have changed.

python -I -S reloader.py FILE... -- PROGRAM ARGUMENT...

A child process looks at the files every second, until the program has ended. Standard library alone, so that
it takes little time and memory.
"""

import os
import signal
import sys
import time

_POLL_S = 1.0


def _stamps(files: list[str]) -> list[tuple[int, int]]:
    stamps = []
    for file in files:
        try:
            status = os.stat(file)
            stamps.append((status.st_mtime_ns, status.st_ino))
        except OSError:
            stamps.append((0, 0))
    return stamps


def _watch(files: list[str], program: int, stamps: list[tuple[int, int]]) -> None:
    while os.getppid() == program:
        if (now := _stamps(files)) != stamps:
            stamps = now
            os.kill(program, signal.SIGHUP)
        time.sleep(_POLL_S)


def main(arguments: list[str]) -> None:
    separator = arguments.index("--")
    files, command = arguments[:separator], arguments[separator + 1 :]
    program, stamps = os.getpid(), _stamps(files)
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the program decides when both end
        _watch(files, program, stamps)
        os._exit(0)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
