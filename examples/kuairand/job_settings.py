"""What the scripts of the job read from the environment: the launcher starts all of them alike."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Chosen by AUC on the last day of the training file, with plain.py --holdout (README).
BATCH_SIZE = 32
DENSE_RATE = 3e-3
EMBEDDING_RATE = 0.1
UNBOUNDED = "unbounded"
_DEFAULT_STALENESS = 8
_HERE = Path(__file__).resolve().parent


class SettingsError(ValueError):
    """An environment variable has a value that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one run.

    data: folder with the Parquet files (KUAIRAND_DIR).
    max_rows: of each file, the first in time; None takes all (KUAIRAND_ROWS).
    output: where results go (KUAIRAND_OUTPUT).
    seed: of the network, and of the embeddings on the servers (SEED).
    reproducible: batches in order and one at a time (REPRODUCIBLE).
    consistency: as `TrainCtx` takes it (CONSISTENCY).
    staleness: as `DataLoader` takes it (EMBEDDING_STALENESS); None is no bound.
    slots: the slots of the embeddings (PERSIA_EMBEDDING_CONFIG).
    batch_size: of one rank (BATCH_SIZE).
    """

    data: Path
    max_rows: int | None
    output: Path
    seed: int
    reproducible: bool
    consistency: str
    staleness: int | None
    slots: Path
    batch_size: int

    @property
    def dense_rate(self) -> float:
        """In proportion to the batch size."""
        return DENSE_RATE * self.batch_size / BATCH_SIZE

    @staticmethod
    def from_environment() -> Settings:
        """Raises SettingsError naming the variable and its value."""
        folder = os.environ.get("KUAIRAND_DIR")
        if not folder:
            raise SettingsError("KUAIRAND_DIR is not set: name the folder with the files of KuaiRand-Pure")
        reproducible = os.environ.get("REPRODUCIBLE", "0") == "1"
        consistency = os.environ.get("CONSISTENCY") or "hybrid"
        return Settings(
            data=Path(folder),
            max_rows=_number("KUAIRAND_ROWS", None, minimum=1),
            output=Path(os.environ.get("KUAIRAND_OUTPUT") or _HERE.parents[1] / "build" / "kuairand"),
            seed=_number("SEED", 0, minimum=0) or 0,
            reproducible=reproducible,
            consistency=consistency,
            staleness=_staleness(consistency, reproducible),
            slots=Path(os.environ.get("PERSIA_EMBEDDING_CONFIG") or _HERE / "embedding_config.yml"),
            batch_size=_number("BATCH_SIZE", BATCH_SIZE, minimum=1) or BATCH_SIZE,
        )


def _staleness(consistency: str, reproducible: bool) -> int | None:
    # The other modes have a bound of their own, or none.
    if consistency not in ("hybrid", "exact") or os.environ.get("EMBEDDING_STALENESS") == UNBOUNDED:
        return None
    return _number("EMBEDDING_STALENESS", 1 if reproducible else _DEFAULT_STALENESS, minimum=1)


def _number(name: str, default: int | None, *, minimum: int) -> int | None:
    text = os.environ.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < minimum:
        raise SettingsError(f"{name} is {text!r}: use a whole number from {minimum}, or leave it unset")
    return int(text)
