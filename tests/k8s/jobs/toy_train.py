"""The training script of the integration tests, at a slow pace, with its settings from the environment."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "integration" / "jobs" / "train.py"

sys.argv[1:] = ["--output", f"{os.environ['TOY_FOLDER']}/report", "--pace", "0.02", "--staleness", "8"]
runpy.run_path(str(SCRIPT), run_name="__main__")
