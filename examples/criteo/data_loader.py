"""A cluster's data loaders; flags are those of train.py."""

from recipe import Recipe, parse

Recipe(parse()).trainer().load()
