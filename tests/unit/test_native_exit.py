"""A process may end while daemon threads are inside the native module."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import threading
import numpy as np
from persia import _native
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.config import SlotConfig, SlotsConfig

slots = SlotsConfig(slots_config={"user": SlotConfig(dim=4)})
bags = _native.EmbeddingBags(
    slots=slots.native_slots(), feature_index_prefix_bit=slots.feature_index_prefix_bit, capacity=10_000
)
bags.configure(SGD(lr=0.1).train_config(EmbeddingConfig()))
ids, lengths = np.arange(1000, dtype=np.uint64), np.ones((1, 1000), np.int64)
calling = threading.Barrier(6)


def look_up():
    bags.lookup(ids, lengths, train=False)
    calling.wait()
    while True:
        bags.lookup(ids, lengths, train=False)


def read_snapshots():  # the native call takes the GIL for a moment
    calling.wait()
    while True:
        snapshot = bags.store.begin_snapshot()
        part = snapshot.part(0)
        while part.read(64):
            pass
        snapshot.commit()
        snapshot.close()


threading.Thread(target=read_snapshots, daemon=True).start()
for _ in range(4):
    threading.Thread(target=look_up, daemon=True).start()
calling.wait()
"""


def test_daemon_threads_in_native_calls_do_not_abort_the_exit() -> None:
    """CPython unwinds their stacks: SIGABRT at a noexcept destructor, SIGSEGV in the unwinder of a wheel."""
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")
