"""Work that rank 0 does for all ranks while they wait for it, however long it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import distributed as dist

from persia.errors import FailedPreconditionError

__all__ = ["done_by_rank_0"]

# Collectives end by the process group's time-out, minutes; loading terabytes may take longer. So rank 0 says
# now and then that it is still at it.
_INTERVAL_S = 5.0
_WORKING, _DONE, _FAILED = 0, 1, 2


def done_by_rank_0(rank: int, work: Callable[[], None], device: torch.device | None) -> None:
    """Runs `work` on rank 0; returns on every rank when it has ended. Every rank must call it.

    Rank 0 raises what `work` raises, the others `FailedPreconditionError`.
    """
    if rank != 0:
        while (status := _broadcast(_WORKING, device)) == _WORKING:
            pass
        if status == _FAILED:
            raise FailedPreconditionError("rank 0 could not load the embeddings: its own error says why")
        return
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="persia-rank-0", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_INTERVAL_S)
        if thread.is_alive():
            _broadcast(_WORKING, device)
    _broadcast(_FAILED if failures else _DONE, device)
    if failures:
        raise failures[0]


def _broadcast(status: int, device: torch.device | None) -> int:
    tensor = torch.tensor([status], device=device)
    dist.broadcast(tensor, src=0)
    return int(tensor)
