"""A server process ends at a stop signal, whenever it arrives and whichever thread receives it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SERVER = """
import signal
import threading
import time

from persia.messaging.session import NatsSession
from persia.roles.lifetime import stopped_by_signals, wait_for_stop


def receive() -> None:
    time.sleep(0.5)  # the main thread waits by then; if it does not yet, the process ends all the same
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(290)


with stopped_by_signals("a server"):
    threading.Thread(target=receive, daemon=True).start()
    {wait}
"""
# Port 9 is "discard", which nothing serves: the connection waits for its deadline.
_CONNECT = "NatsSession('nats://127.0.0.1:9', 'job', name='server').connect(290.0)"


@pytest.mark.parametrize("wait", ["wait_for_stop()", _CONNECT], ids=["serving", "connecting"])
def test_a_signal_that_does_not_interrupt_the_main_thread_stops_the_server(wait: str) -> None:
    # The same as a signal that arrives between the interpreter's last look for signals and the wait, which
    # cannot be timed: the handler is due, and nothing wakes the main thread.
    server = subprocess.run(
        [sys.executable, "-c", _SERVER.format(wait=wait)], capture_output=True, text=True, timeout=240
    )
    assert server.returncode == 0, server.stderr
    assert "a server stopped" in server.stdout + server.stderr
