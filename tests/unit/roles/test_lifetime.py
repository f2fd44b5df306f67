"""A server process ends at a stop signal, whenever it arrives and whichever thread receives it."""

from __future__ import annotations

import subprocess
import sys

_SERVER = """
import signal
import threading
import time

from persia.roles.lifetime import stopped_by_signals, wait_for_stop


def receive() -> None:
    time.sleep(0.5)  # the main thread waits by then; if it does not yet, the process ends all the same
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(60)


with stopped_by_signals("a server"):
    threading.Thread(target=receive, daemon=True).start()
    wait_for_stop()
"""


def test_a_signal_that_does_not_interrupt_the_main_thread_stops_the_server() -> None:
    # The same as a signal that arrives between the interpreter's last look for signals and the wait, which
    # cannot be timed: the handler is due, and nothing wakes the main thread.
    server = subprocess.run([sys.executable, "-c", _SERVER], capture_output=True, text=True, timeout=40)
    assert server.returncode == 0, server.stderr
    assert "a server stopped" in server.stdout + server.stderr
