"""Where the scripts of small whole jobs are, which tests and benchmarks run, and the slots of their data."""

from __future__ import annotations

from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "tests" / "integration" / "jobs"
SLOTS = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 8}, "items": {"dim": 8}}}
