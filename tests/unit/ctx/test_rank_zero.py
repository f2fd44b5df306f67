"""What rank 0 does for all, in a process group of two real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RANK = """
import datetime, json, sys, time
from pathlib import Path
from torch import distributed as dist
from persia.ctx.ranks import done_by_rank_0
from persia.errors import StorageError

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))

def fail_by(error):
    raise error

def told(work):
    try:
        done_by_rank_0(rank, work, None)
    except Exception as failure:
        return [type(failure).__name__, str(failure)]

# Rank 0 works for all when all are there: nothing that the others did before comes after.
last_gradient = Path(sys.argv[2] + ".arrived")
if rank == 1:
    time.sleep(1)
    last_gradient.touch()

works = [
    lambda: None if last_gradient.exists() else fail_by(AssertionError("rank 0 did not wait for rank 1")),
    lambda: fail_by(StorageError("s3://m/\\u00e9.emb could not be read" + "\\U0001f600" * 5000)),
    lambda: fail_by(KeyError("bug")),
    lambda: None,
]
print(json.dumps([told(work) for work in works]))
dist.destroy_process_group()
"""


def test_all_ranks_are_told_what_failed(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert [told and told[0] for told in first] == [None, "StorageError", "KeyError", None]
    assert [told and told[0] for told in second] == [None, "StorageError", "InternalError", None]
    assert first[1][1].startswith("s3://m/é.emb could not be read")
    assert second[1][1].startswith("rank 0: s3://m/é.emb could not be read")
    assert second[2][1] == "rank 0: KeyError('bug')"
