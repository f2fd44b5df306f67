"""`data-loader --linger` outlives its script until it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE_S = 120.0


@pytest.fixture
def start(tmp_path):
    processes = []

    def start(code: str) -> subprocess.Popen[str]:
        script = tmp_path / "loader.py"
        script.write_text(code)
        command = [sys.executable, "-m", "persia.launcher", "data-loader", "--linger", str(script)]
        env = {**os.environ, "PERSIA_NATS_URL": "nats://127.0.0.1:1"}  # nobody connects to it
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stays_until_it_is_stopped(start, number):
    # Printed by an exit handler: those have run while the launcher stays.
    process = start("import atexit; atexit.register(print, 'ended', flush=True)")
    assert process.stdout.readline() == "ended\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while children.read_text():
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == 0


def test_a_stop_signal_reaches_the_script(start):
    process = start(
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 3
