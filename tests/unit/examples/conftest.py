"""Scripts of an example import their neighbours by name: the tests do the same."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "examples" / "adult_income"))
