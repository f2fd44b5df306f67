"""`python -m benchmarks.chaos`: kills processes of a job that restarts by itself, and compares its result."""
