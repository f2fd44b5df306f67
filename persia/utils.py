"""Small helpers that scripts written for the published API import."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from persia.errors import InvalidArgumentError, InvalidTypeError, NotFoundError

MAXIMUM_LOCAL_PORT_NUM = 65535

_seed: int | None = None


def setup_seed(seed: int) -> None:
    """Seeds Python, NumPy and torch, and switches torch to deterministic algorithms.

    `seed` also becomes the default seed of initial embedding values (`persia.embedding.EmbeddingConfig`).
    Raises InvalidTypeError for anything but an int.
    """
    import numpy as np
    import torch

    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InvalidTypeError(f"seed={seed!r} must be an int")
    global _seed
    _seed = seed
    random.seed(seed)
    # The range that NumPy's generator takes is 32 bits; torch's has 64.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CUDA devices too
    # Without it torch refuses cuBLAS as not deterministic. Read when CUDA is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def get_seed() -> int | None:
    """The seed given to `setup_seed`, or None."""
    return _seed


def load_yaml(filepath: str | os.PathLike[str]) -> Any:
    """The content of the YAML file `filepath`. Raises FileNotFoundError, which names it."""
    path = Path(filepath)
    if not path.is_file():
        raise FileNotFoundError(f"YAML file {path} does not exist")
    with path.open(encoding="utf-8") as file:
        return yaml.safe_load(file)


def dump_yaml(content: object, filepath: str | os.PathLike[str]) -> None:
    """Writes `content` to `filepath` as YAML, keeping the order of keys."""
    with Path(filepath).open("w", encoding="utf-8") as file:
        yaml.safe_dump(content, file, sort_keys=False)


def run_command(cmd: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Runs the command `cmd` to its end; `env` replaces the environment.

    Raises subprocess.CalledProcessError when it fails.
    """
    subprocess.run(list(cmd), env=None if env is None else dict(env), check=True)


def resolve_binary_execute_path(binary_name: str) -> str:
    """The path of executable `binary_name` of this Python environment, or of PATH. Raises NotFoundError."""
    beside_python = Path(sys.executable).parent / binary_name
    found = str(beside_python) if os.access(beside_python, os.X_OK) else shutil.which(binary_name)
    if found is None:
        raise NotFoundError(f"executable {binary_name!r} is neither beside {sys.executable} nor on PATH")
    return found


def find_free_port(port: int = 10000, interval: int = 1) -> int:
    """The first port from `port` on, in steps of `interval`, that nothing on loopback listens on.

    Raises:
        InvalidArgumentError: none is free up to 65535, or `port` or `interval` is below 1.
    """
    if port < 1 or interval < 1:
        raise InvalidArgumentError(f"port={port} and interval={interval} must be at least 1")
    # Only a hint: another process may take the port before the caller does. Servers here bind port 0.
    while port <= MAXIMUM_LOCAL_PORT_NUM:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                port += interval
    raise InvalidArgumentError(f"no free port up to {MAXIMUM_LOCAL_PORT_NUM}")
