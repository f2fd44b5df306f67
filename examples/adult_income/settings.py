"""All that the job's scripts read from the environment: the launcher starts them without arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from dataset import DEFAULT_DIRECTORY
from persia.env import get_resume_checkpoint
from recipes import PUBLISHED, RECIPES, Recipe

DEFAULT_SEED = 3  # The published example's.
# Enough for lookup, training and update to overlap. One pass over so little data notices more: the README
# has the figures.
DEFAULT_STALENESS = 4
DEFAULT_SLOTS = Path(__file__).resolve().parent / "config" / "embedding_config.yml"


class SettingsError(ValueError):
    """An environment variable has a value that the example cannot use."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one run.

    data: directory of the prepared data (ADULT_DATA).
    output: directory for history, summary and checkpoint (ADULT_OUTPUT).
    seed: seeds the network, and the embeddings on the servers (SEED).
    reproducible, embedding_staleness: as `DataLoader` takes them (REPRODUCIBLE, EMBEDDING_STALENESS, which
        is a number or "unbounded").
    slots: the slots of the embeddings (PERSIA_EMBEDDING_CONFIG).
    enable_cuda: False keeps a rank on the CPU, also where there is a GPU (ENABLE_CUDA).
    checkpoint: where training goes on from, a directory or URL; None begins anew (ADULT_CHECKPOINT, or
        PERSIA_RESUME_CHECKPOINT, which the Kubernetes operator sets where a job goes on).
    consistency: as `TrainCtx` takes it; synchronous and asynchronous bound staleness themselves
        (CONSISTENCY).
    num_evaluations: on the test data, the last of them at the end (ADULT_EVALUATIONS).
    recipe: batch size, passes and rates (ADULT_RECIPE, a name in RECIPES). BATCH_SIZE replaces the batch
        size of a rank, and the dense rate changes in proportion.
    prepared_batches: batches come from the rank's own memory, not from data loaders (ADULT_PREPARED_BATCHES).
    """

    data: Path
    output: Path
    seed: int
    reproducible: bool
    embedding_staleness: int | None
    slots: Path
    enable_cuda: bool
    checkpoint: str | None = None
    consistency: str = "hybrid"
    num_evaluations: int = 5
    recipe: Recipe = PUBLISHED
    prepared_batches: bool = False

    @staticmethod
    def from_environment() -> Settings:
        """Raises SettingsError naming the variable and its value."""
        seed = _whole_number("SEED", minimum=0)
        reproducible = _switch("REPRODUCIBLE", default=False)
        consistency = os.environ.get("CONSISTENCY") or "hybrid"
        return Settings(
            data=Path(os.environ.get("ADULT_DATA", DEFAULT_DIRECTORY)),
            output=Path(os.environ.get("ADULT_OUTPUT", DEFAULT_DIRECTORY / "run")),
            seed=DEFAULT_SEED if seed is None else seed,
            reproducible=reproducible,
            embedding_staleness=_staleness(consistency, reproducible),
            slots=Path(os.environ.get("PERSIA_EMBEDDING_CONFIG") or DEFAULT_SLOTS),
            enable_cuda=_switch("ENABLE_CUDA", default=True),
            checkpoint=os.environ.get("ADULT_CHECKPOINT") or get_resume_checkpoint(),
            consistency=consistency,
            num_evaluations=_whole_number("ADULT_EVALUATIONS", minimum=1) or 5,
            recipe=_recipe(
                os.environ.get("ADULT_RECIPE") or "published", _whole_number("BATCH_SIZE", minimum=1)
            ),
            prepared_batches=_switch("ADULT_PREPARED_BATCHES", default=False),
        )


def _staleness(consistency: str, reproducible: bool) -> int | None:
    if consistency not in ("hybrid", "exact") or os.environ.get("EMBEDDING_STALENESS") == "unbounded":
        return None
    given = _whole_number("EMBEDDING_STALENESS", minimum=1)
    return given or (1 if reproducible else DEFAULT_STALENESS)


def _recipe(name: str, batch_size: int | None) -> Recipe:
    if name not in RECIPES:
        raise SettingsError(f"ADULT_RECIPE is {name!r}: use one of {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    if batch_size is None:
        return recipe
    dense_rate = recipe.dense_rate * batch_size / recipe.batch_size
    return replace(recipe, batch_size=batch_size, dense_rate=dense_rate)


def _switch(name: str, default: bool) -> bool:
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise SettingsError(f"{name} is {text!r}: use 0 or 1")
    return text == "1" if text else default


def _whole_number(name: str, minimum: int) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < minimum:
        raise SettingsError(f"{name} is {text!r}: use a whole number from {minimum}, or leave it unset")
    return int(text)
