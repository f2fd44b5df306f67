"""Seeds and reported values are those of the process, which all tests share."""

from __future__ import annotations

import pytest

from persia import observability, utils


@pytest.fixture(autouse=True)
def process_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the seed and the reported values back after each test."""
    monkeypatch.setattr(utils, "_seed", utils.get_seed())
    monkeypatch.setattr(observability, "_values", observability.reported())
