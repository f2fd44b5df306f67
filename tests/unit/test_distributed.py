"""What `DDPOption` sets for the connections between ranks."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from persia.distributed import DDPOption

_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS of linux/tcp.h


def _rto_max_ms(connection: socket.socket) -> int | None:
    """None: this Linux is older than 6.15."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS)
    return None


def test_ranks_give_up_after_twice_the_deadline_and_retransmit_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "40")
    option = DDPOption("file", "gloo", sync_file=str(tmp_path / "store"))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        can_limit = _rto_max_ms(one) is not None
        option.convert2distributed_model(torch.nn.Linear(1, 1), world_size=1, rank_id=0)
        try:
            group = dist.group.WORLD
            assert group is not None
            timeout = group._get_backend(torch.device("cpu")).options._timeout
        finally:
            dist.destroy_process_group()
        assert timeout.total_seconds() == 80
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 80_000
        assert _rto_max_ms(one) == (1000 if can_limit else None)
        one.sendall(b"it is still open")
