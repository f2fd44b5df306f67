"""Work that rank 0 does for all ranks while they wait for it, however long it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import distributed as dist

from persia.checkpoint.protocol import Report, State
from persia.errors import InternalError, PersiaError

__all__ = ["done_by_rank_0"]

# Collectives end by the process group's time-out, minutes; loading terabytes may take longer. So rank 0 says
# now and then that it is still at it.
_INTERVAL_S = 5.0
_WORKING, _DONE, _FAILED = 0, 1, 2
# Collectives want to know sizes before. A character is at most 12 bytes of JSON.
_MAX_ERROR_CHARS = 2000
_ERROR_BYTES = 12 * _MAX_ERROR_CHARS + 1000


def done_by_rank_0(rank: int, work: Callable[[], None], device: torch.device | None) -> None:
    """Runs `work` on rank 0; returns on every rank when it has ended. Every rank must call it.

    All ranks raise what `work` raises: the others an error of the same class, if it is one of persia's.
    """
    if rank != 0:
        while (status := _broadcast(_WORKING, device)) == _WORKING:
            pass
        if status == _FAILED:
            error = _told(None, device)
            raise type(error)(f"rank 0: {error}")
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
        _told(failures[0], device)
        raise failures[0]


def _told(failure: BaseException | None, device: torch.device | None) -> PersiaError:
    """Rank 0 tells the others what failed; their `failure` is None."""
    error = failure if isinstance(failure, PersiaError) else InternalError(repr(failure))
    text = Report(state=State.FAILED, error=type(error)(str(error)[:_MAX_ERROR_CHARS])).encode()
    content = torch.zeros(_ERROR_BYTES, dtype=torch.uint8, device=device)
    content[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=0)
    return Report.decode(bytes(content.cpu().tolist()).rstrip(b"\0")).error or error


def _broadcast(status: int, device: torch.device | None) -> int:
    tensor = torch.tensor([status], device=device)
    dist.broadcast(tensor, src=0)
    return int(tensor)
