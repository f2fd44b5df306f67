"""A cluster's data loaders; flags are those of train.py."""

from persia import DataCtx
from recipe import Recipe, parse

flags = parse()
with DataCtx() as data:
    # Batches are those of the ranks only if both divide --batch_size by the same number.
    Recipe(flags, data.world_size).trainer().load(data)
