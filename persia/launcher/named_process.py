"""Names its own process group to a supervisor's watchdog, then becomes the process that it was started for.

Run as a script with the path of a program and its argument vector; the standard input is the watchdog's. A
supervisor that is killed while it starts a process leaves no orphan so. Imports nothing of persia.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Does not return."""
    # The pipe breaks only if the watchdog is killed, which must not harm the process.
    with contextlib.suppress(OSError):
        os.write(0, b"+%d\n" % os.getpid())
    # A process must not take input from the terminal of the launcher.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    # As it was given: Python itself adds LC_CTYPE to os.environ in the C locale.
    with open("/proc/self/environ", "rb") as file:
        entries = [entry.split(b"=", 1) for entry in file.read().split(b"\0") if entry]
    os.execve(sys.argv[1], sys.argv[2:], dict(entries))


if __name__ == "__main__":
    main()
