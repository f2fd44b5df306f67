"""What `DDPOption` sets for the connections between ranks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist

from persia import distributed
from persia.distributed import DDPOption
from tests.ports import free_port

_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS of linux/tcp.h


def _limits(connection: socket.socket) -> tuple[int, int | None]:
    """TCP_USER_TIMEOUT, and TCP_RTO_MAX_MS: None if this Linux is older than 6.15."""
    timeout, longest = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), None
    with contextlib.suppress(OSError):
        longest = connection.getsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS)
    return timeout, longest


def _limits_of(names: set[str]) -> list[tuple[int, int | None]]:
    """Of those sockets that are of TCP."""
    found = []
    for name in names:
        connection = socket.socket(fileno=distributed._sockets()[name])
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            found.append(_limits(connection))
        connection.detach()
    return found


@pytest.fixture
def connect() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as connections:
        yield lambda: connections.enter_context(socket.create_connection(server.getsockname()))


def _join(option: DDPOption) -> None:
    option.convert2distributed_model(torch.nn.Linear(1, 1), world_size=1, rank_id=0)


@pytest.mark.parametrize(("deadline_s", "give_up_ms"), [("40", 80_000), ("1e9", 2**31 - 1)])
def test_only_connections_between_ranks_retransmit_every_second_until_twice_the_deadline(
    monkeypatch: pytest.MonkeyPatch, connect, deadline_s: str, give_up_ms: int
) -> None:
    reconnected = []

    class Option(DDPOption):
        def _where(self, master_addr: str | None) -> str:
            reconnected.append(connect())
            reconnected[0].setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return super()._where(master_addr)

    monkeypatch.setenv("PERSIA_DEADLINE_SEC", deadline_s)
    own, of_rpc = connect(), connect()
    of_rpc.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    untouched = _limits(own)
    before = {*distributed._sockets()}
    _join(Option("tcp", "gloo", master_addr="127.0.0.1", master_port=free_port()))
    try:
        group = dist.group.WORLD
        assert group is not None
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        made = {*distributed._sockets()} - before
        limits = _limits_of(made)
    finally:
        dist.destroy_process_group()
    assert timeout.total_seconds() == 2 * float(deadline_s)
    assert [_limits(own), _limits(of_rpc)] == [untouched, (30_000, untouched[1])]
    assert _limits(reconnected[0]) == untouched
    limits.remove(untouched)  # the last one
    assert limits, "the store and gloo have sockets"
    assert {*limits} == {untouched if untouched[1] is None else (give_up_ms, 1000)}
    own.sendall(b"it is still open")


def test_connections_of_a_group_that_the_script_has_made_keep_their_options(connect) -> None:
    before = {*distributed._sockets()}
    untouched = _limits(connect())
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        made = {*distributed._sockets()} - before
        _join(DDPOption("tcp", "gloo"))
        assert {*_limits_of(made)} == {untouched}
    finally:
        dist.destroy_process_group()
