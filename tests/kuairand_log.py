"""A made-up log with the columns of KuaiRand-Pure that its example and the tutorial read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NUM_ROWS = 16_384


def write_log(path: Path, seed: int) -> None:
    """Impressions with the columns of KuaiRand-Pure that count; one user in three clicks a lot."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    users, videos = rng.integers(0, 300, NUM_ROWS), rng.integers(0, 200, NUM_ROWS)
    clicked = rng.random(NUM_ROWS) < np.where(users % 3 == 0, 0.8, 0.3)
    columns = {
        "user_id": users,
        "video_id": videos,
        "author_id": videos // 4,
        "tab": rng.integers(0, 3, NUM_ROWS),
        "time_ms": 1_650_000_000_000 + rng.integers(0, 10**8, NUM_ROWS),
        "duration_ms": rng.integers(1_000, 100_000, NUM_ROWS),
        "is_click": clicked.astype(np.int64),
    }
    pq.write_table(pa.table(columns), path)
