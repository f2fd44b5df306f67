"""The heap of a process that allocates the same again and again."""

from __future__ import annotations

import ctypes


def keep_heap() -> None:
    """Keeps freed memory for the next batch.

    Else glibc returns the end of the heap after each batch, and cleared pages cost more than a small model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: where glibc's own rule ends
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
