"""Sends the synthetic batches of the integration tests until the test says that it has seen enough."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from persia.ctx import DataCtx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integration" / "jobs"))

from loader import make_batch

folder = Path(os.environ["TOY_FOLDER"])
num_sent = 0
with DataCtx() as ctx:
    while not (folder / "enough").exists():
        ctx.send_data(make_batch(num_sent))
        num_sent += 1
(folder / "num_sent").write_text(str(num_sent))
