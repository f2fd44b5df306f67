"""`python -m benchmarks.network`: a job on several hosts whose network fails; how long training pauses."""
