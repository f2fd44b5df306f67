"""The long-running servers of a job, as functions for the command line and for scripts."""
