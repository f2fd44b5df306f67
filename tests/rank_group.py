"""Two ranks of a gloo group, as processes that run one case of a test file, which is their script."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import distributed as dist

NUM_RANKS = 2
_DEADLINE_S = 120


def run_ranks(script: str, case: str, folder: Path) -> None:
    """Until all have ended, each without an error. The script calls `be_rank`."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", script, case, str(rank), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=_DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output


def be_rank(cases: Mapping[str, Callable[[int], None]], case: str, rank: str, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=NUM_RANKS)
    try:
        cases[case](int(rank))
    finally:
        gc.collect()  # errors that were caught keep the group, whose threads must end before the interpreter
        dist.destroy_process_group()
