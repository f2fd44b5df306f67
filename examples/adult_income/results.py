"""What a run leaves in its output directory, and how it goes before the next run starts.

A run that fails halfway must not leave the picture or the checkpoint of an earlier one beside its history.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

FILES = (
    *("history.jsonl", "summary.partial.json", "summary.json", "curves.png"),
    *("train.log", "cluster.log"),
)
CHECKPOINT_FILES = ("dense.pt", "jit_dense.pt", "manifest.json", "opt.pt")


def remove_results(output: Path) -> None:
    """Removes these files only: the prepared data stays, and so does whatever somebody else put there."""
    checkpoint = output / "checkpoint"
    for path in [output / name for name in FILES] + [checkpoint / name for name in CHECKPOINT_FILES]:
        path.unlink(missing_ok=True)
    for dump in checkpoint.glob("dump-*"):
        shutil.rmtree(dump, ignore_errors=True)
    with suppress(OSError):  # Not there, or with files of somebody else in it.
        checkpoint.rmdir()
