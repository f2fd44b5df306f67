"""Servers and loaders start without torch, whose import costs seconds and memory in each process."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "statement",
    [
        "from persia.roles.parameter_server import run_parameter_server",
        "from persia.roles.embedding_worker import run_embedding_worker",
        "from persia import DataCtx, IDTypeFeature, PersiaBatch",
    ],
)
def test_what_needs_no_torch_does_not_import_it(statement: str) -> None:
    code = f"import sys; import persia._native; {statement}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
