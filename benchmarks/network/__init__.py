"""`python -m benchmarks.network`: a job on several hosts whose network fails, and how long training pauses."""
