"""Raw logs in Criteo's format, made up, for tests and benchmarks of preprocessing."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_clicks(
    path: Path, num_rows: int, *, seed: int = 0, numerical: int = 13, categorical: int = 26
) -> None:
    """Writes `num_rows` lines with missing values, negative numbers and categories of a power law."""
    random = np.random.default_rng(seed)
    with open(path, "w", encoding="utf-8") as file:
        for first in range(0, num_rows, 50_000):
            size = min(50_000, num_rows - first)
            columns = [random.integers(0, 2, size).astype(str)]
            for _ in range(numerical):
                columns.append(
                    np.where(random.random(size) < 0.2, "", random.integers(-4, 5000, size).astype(str))
                )
            for index in range(categorical):
                ids = np.minimum(random.zipf(1.2, size), 10 ** (1 + index % 7)) * 2654435761 % (1 << 32)
                texts = np.array([f"{number:08x}" for number in ids])
                columns.append(np.where(random.random(size) < 0.1, "", texts))
            file.writelines("\t".join(row) + "\n" for row in zip(*columns, strict=True))
