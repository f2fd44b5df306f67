"""Rows of a checkpoint for tools, without a job: read, checked, compared and exported.

reader      blocks of rows, the slots they belong to, and whether all files are whole
comparison  what changed between two checkpoints
export      Parquet files or NumPy arrays
"""
