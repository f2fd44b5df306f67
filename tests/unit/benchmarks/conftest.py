"""`benchmarks` is not installed: it runs from the repository's root, and so do its tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Put back: the program handles it as its own process's, and later tests in this one have other ideas."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
