"""How the example is trained: as the published one, or with settings chosen on data held out of training."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PUBLISHED", "RECIPES", "TUNED", "Recipe"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Passes over the training data; the rates are those of SGD for the network and of Adagrad for rows."""

    batch_size: int
    num_passes: int
    dense_rate: float
    embedding_rate: float


PUBLISHED = Recipe(batch_size=128, num_passes=1, dense_rate=0.1, embedding_rate=1e-2)
# Best in plain PyTorch on the last fifth of the training file (README).
TUNED = Recipe(batch_size=256, num_passes=4, dense_rate=3e-2, embedding_rate=1e-3)
RECIPES = {"published": PUBLISHED, "tuned": TUNED}
