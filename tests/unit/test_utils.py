"""Published helpers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia import utils
from persia.embedding import EmbeddingConfig
from persia.errors import InvalidArgumentError, InvalidTypeError, NotFoundError


def test_setup_seed_repeats_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "_seed", None)
    try:
        utils.setup_seed(3)
        first = (np.random.rand(), torch.rand(1).item())
        assert torch.are_deterministic_algorithms_enabled()
        utils.setup_seed(3)
        assert (np.random.rand(), torch.rand(1).item()) == first
        assert EmbeddingConfig().effective_seed == 3
        assert EmbeddingConfig(seed=5).effective_seed == 5
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seed", ["3", 3.0, True, None])
def test_a_seed_is_an_int(seed: Any) -> None:
    before = utils.get_seed()
    with pytest.raises(InvalidTypeError, match="seed="):
        utils.setup_seed(seed)
    assert utils.get_seed() == before


def test_yaml_round_trip_keeps_order(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    utils.dump_yaml({"b": 1, "a": [2]}, path)
    assert path.read_text().startswith("b:")
    assert utils.load_yaml(path) == {"b": 1, "a": [2]}
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yml"):
        utils.load_yaml(tmp_path / "nowhere.yml")


def test_run_command() -> None:
    utils.run_command([sys.executable, "-c", "import os; assert os.environ['A'] == '1'"], {"A": "1"})
    with pytest.raises(subprocess.CalledProcessError):
        utils.run_command([sys.executable, "-c", "raise SystemExit(3)"])


def test_find_free_port_skips_taken_ones() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert utils.find_free_port(port) > port
    with pytest.raises(InvalidArgumentError, match="65535"):
        utils.find_free_port(70000)
    with pytest.raises(InvalidArgumentError, match="interval=0"):
        utils.find_free_port(10000, interval=0)


def test_resolve_binary() -> None:
    assert os.access(utils.resolve_binary_execute_path("sh"), os.X_OK)
    with pytest.raises(NotFoundError, match="no-such-binary"):
        utils.resolve_binary_execute_path("no-such-binary")


def test_importing_persia_does_not_import_torch() -> None:
    code = "import sys, persia, persia.errors, persia.env; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
