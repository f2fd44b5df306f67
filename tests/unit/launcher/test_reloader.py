"""The program that tells a broker by SIGHUP that its certificates have changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from persia.launcher import reloader

# Begins without a handler, as every program does. It changes the file itself, so that the watcher surely sees
# the change before there is a handler.
PROGRAM = """
import pathlib, signal, socket, sys, time
pathlib.Path(sys.argv[1]).write_text("new")
time.sleep(2.5)
signal.signal(signal.SIGHUP, lambda *_: (print("reloaded", flush=True), sys.exit()))
listener = socket.create_server(("127.0.0.1", 0))
time.sleep(60)
"""


def test_a_change_during_the_start_is_signalled_after_it(tmp_path: Path) -> None:
    file = tmp_path / "tls.crt"
    file.write_text("old")
    script = [sys.executable, "-I", "-S", str(Path(str(reloader.__file__)))]
    program = [sys.executable, "-c", PROGRAM, str(file)]
    result = subprocess.run(
        [*script, str(file), "--", *program], capture_output=True, text=True, timeout=100, check=False
    )
    assert (result.returncode, result.stdout) == (0, "reloaded\n"), result.stderr
