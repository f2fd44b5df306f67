"""Persia beside the libraries a user could pick instead: `python -m benchmarks`, explained in README.md."""
