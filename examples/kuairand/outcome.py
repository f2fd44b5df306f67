"""What a run leaves behind, the same for the job and for plain PyTorch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from persia.nn import ClickQuality


class Throughput:
    """Samples per second. The first step is left out: it waits for the data loader to start."""

    def __init__(self) -> None:
        self._begin_s: float | None = None
        self._num_samples = 0

    def step(self, num_samples: int) -> None:
        if self._begin_s is None:
            self._begin_s = time.perf_counter()
        else:
            self._num_samples += num_samples

    def overall(self) -> float:
        """Until now; 0.0 until there are two steps."""
        return self._num_samples / (time.perf_counter() - self._begin_s) if self._begin_s is not None else 0.0


def describe(quality: ClickQuality) -> str:
    """One line for people."""
    return (
        f"AUC {quality.auc:.4f}, log loss {quality.log_loss:.4f}, "
        f"normalized entropy {quality.normalized_entropy:.4f}, calibration {quality.calibration:.4f}"
    )


def write_summary(folder: Path, **values: Any) -> None:
    """Writes `folder`/summary.json, complete or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / "summary.partial.json"
    aside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    aside.replace(folder / "summary.json")
