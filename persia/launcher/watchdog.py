"""Ends a supervisor's processes when the supervisor itself is killed, so that no job leaves orphans behind.

Run as a script, in a process of its own: reads lines "+<process group>" and "-<process group>" from the
standard input, whose other end only the supervisor holds. When that end closes, the groups still listed are
terminated. A pipe rather than PR_SET_PDEATHSIG, which fires when the *thread* that started a child ends. With
"--detach" it is no child of the supervisor, whose end may be that of its children: Ray kills them.
Imports nothing of persia.
"""

import contextlib
import os
import signal
import sys
import time

_GRACE_S = 5.0


def _signal_groups(groups: set[int], number: int) -> set[int]:
    """Sends `number`; returns the groups that still have members."""
    alive = set()
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            alive.add(group)
    return alive


def main() -> None:
    """Reads until the supervisor is gone."""
    if "--detach" in sys.argv:
        if os.fork():
            os._exit(0)
        os.setsid()
    # Ctrl-C reaches this process, too; the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a terminal that is closed, which ends the supervisor
    groups: set[int] = set()
    for line in sys.stdin:
        # Group numbers are reused by the kernel: a group that has ended must be forgotten.
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    _terminate(groups)


def _terminate(groups: set[int]) -> None:
    deadline = time.monotonic() + _GRACE_S
    groups = _signal_groups(groups, signal.SIGTERM)
    while groups and time.monotonic() < deadline:
        time.sleep(0.1)
        groups = _signal_groups(groups, 0)
    _signal_groups(groups, signal.SIGKILL)


if __name__ == "__main__":
    main()
