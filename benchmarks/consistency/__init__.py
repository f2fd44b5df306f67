"""The study of consistency: what staleness costs in AUC and gains in speed, on real data.

`python -m benchmarks.consistency` runs it; docs/consistency.md explains it and shows its figures.
"""
