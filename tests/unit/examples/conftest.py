"""Scripts of an example import their neighbours by name: the tests do the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "examples" / "adult_income"))


@pytest.fixture(scope="session")
def adult_source() -> Path:
    """A folder with the real UCI files; the test is skipped, saying so, where there is none."""
    directory = Path(os.environ.get("ADULT_SOURCE") or REPOSITORY.parent / "shared" / "data" / "adult")
    if not any((directory / f"adult.data{suffix}").is_file() for suffix in ("", ".xz")):
        pytest.skip(f"no UCI Adult files in {directory}: set ADULT_SOURCE to a folder that has them")
    return directory
