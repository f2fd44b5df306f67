"""`benchmarks` is not installed: it runs from the repository's root, and so do its tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
