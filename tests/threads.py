"""The threads that a test leaves behind."""

from __future__ import annotations

import threading

# The audit log's thread lives as long as its process, whichever test has started it.
_OF_THE_PROCESS = "persia-audit"


def expect_ended(before: set[threading.Thread], prefix: str = "") -> None:
    """Waits for the threads named `prefix`... that are not in `before`; fails where one goes on."""
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(prefix) and thread.name != _OF_THE_PROCESS:
            thread.join(120)
            assert not thread.is_alive(), f"{thread.name} is left behind"
