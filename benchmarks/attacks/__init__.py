"""Attacks on a running job from outside, for the tests in `tests/security` and for `benchmarks.security`."""
