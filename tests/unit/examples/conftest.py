"""Scripts of an example import their neighbours by name: the tests do the same."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "examples" / "adult_income"))
sys.path.append(str(REPOSITORY / "examples" / "criteo"))  # last: its train.py is not the one tests import
