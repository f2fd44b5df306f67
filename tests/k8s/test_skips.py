"""Without the persia-k8s distribution, the tests of this folder are skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys
sys.modules.update(dict.fromkeys(["persia_k8s", "kopf", "kubernetes", "urllib3"]))  # None: not found
import pytest
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", sys.argv[1]]))
"""


def test_without_the_distribution_the_tests_are_skipped() -> None:
    module = Path(__file__).with_name("test_end_to_end.py")
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(module)], capture_output=True, text=True, timeout=240, check=False
    )
    assert "needs the persia-k8s distribution" in run.stdout, run.stdout + run.stderr
