"""Which connections to the broker are broken: those whose other end does not answer, not busy ones."""

from __future__ import annotations

from typing import Any

import pytest

from persia.messaging import client
from persia.messaging.client import CutDetector


class Connection:
    """Transport, socket and loop of a detector. `infos` are what the kernel says at its checks."""

    def __init__(self, *infos: bytes) -> None:
        self.infos = list(infos)
        self.next_check: Any = None
        self.is_broken = False

    def get_extra_info(self, _name: str) -> Connection:
        return self

    def setsockopt(self, *_option: int) -> None:
        pass

    def getsockopt(self, *_option: int) -> bytes:
        if not self.infos:
            raise OSError("closed")
        return self.infos.pop(0)

    def call_later(self, _delay_s: float, check: Any) -> None:
        self.next_check = check

    def abort(self) -> None:
        self.is_broken = True


def info(*, probes: int = 0, unacked: int = 0, sent_ms: int = 0, heard_ms: int = 2000) -> bytes:
    return client._TCP_INFO.pack(probes, unacked, sent_ms, heard_ms, heard_ms)


def is_broken(*infos: bytes) -> bool:
    connection: Any = Connection(*infos)
    CutDetector(connection, connection)
    while connection.next_check is not None:
        check, connection.next_check = connection.next_check, None
        check()
    assert connection.is_broken or not connection.infos
    return bool(connection.is_broken)


@pytest.mark.parametrize("unanswered", [info(probes=1), info(unacked=1)], ids=["idle", "sending"])
def test_a_connection_is_broken_whose_other_end_does_not_answer(unanswered: bytes) -> None:
    assert is_broken(*[unanswered] * 4)
    assert not is_broken(*[unanswered] * 3)
    assert not is_broken(*[unanswered] * 3, info(unacked=1, heard_ms=10), *[unanswered] * 3)


@pytest.mark.parametrize(
    "answered",
    [info(), info(unacked=9, heard_ms=10), info(unacked=9, sent_ms=6000, heard_ms=5999)],
    ids=["idle", "sending", "full: repeats ever more seldom, and is answered"],
)
def test_a_connection_is_kept_whose_other_end_answers(answered: bytes) -> None:
    assert not is_broken(*[answered] * 20)
