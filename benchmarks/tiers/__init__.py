"""What it costs to keep rows in a pool: the same jobs with their rows in memory, in turns."""
