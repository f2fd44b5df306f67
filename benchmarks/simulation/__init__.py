"""Deterministic simulation of the protocol: `python -m benchmarks.simulation`."""
