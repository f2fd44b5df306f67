"""A position in a stream of packets: of a packet, a checkpoint or a follower."""

from __future__ import annotations

import datetime
import re
import secrets
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

# Patterns that pydantic's expressions read as well as Python's.
STREAM = "[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}"
# Twelve digits: names sort like numbers, and a listing of the storage is in order.
_NAME = f"packet-({STREAM})-([0-9]{{12}})"
PACKET_FOLDER = f"{_NAME}-[0-9a-f]{{8}}"
_MAX_NUMBER = 10**12 - 1


def make_stream_id() -> str:
    """A unique name, for the packets of one run of a trainer or for a dump; names sort by their time."""
    # Random as well: two runs that start in the same second must not write to one name.
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return f"{stamp}-{secrets.token_hex(4)}"


@dataclass(frozen=True, order=True)
class Position:
    """Packet `number` of `stream`; of a checkpoint or a follower: that packet and all before it are in it.

    Ordered by stream, the later started one last, then by number. Number 0 is before the first packet.
    """

    # Named by the time of its start, so that the order of names is the order of runs.
    stream: Annotated[str, Field(pattern=f"^{STREAM}$")]
    number: Annotated[int, Field(strict=True, ge=0, le=_MAX_NUMBER)]

    @property
    def name(self) -> str:
        """The name of a packet's manifest, without its ending; names sort like positions."""
        return f"packet-{self.stream}-{self.number:012d}"

    @property
    def next(self) -> Position:
        return Position(self.stream, self.number + 1)

    def make_folder(self) -> str:
        """A name for the files of one attempt to write the packet: unlike those of all others."""
        return f"{self.name}-{secrets.token_hex(4)}"

    def __str__(self) -> str:
        return f"{self.stream}/{self.number}"

    @classmethod
    def parse(cls, name: str) -> Position | None:
        """The reverse of `name`, also for a folder; None: it is no such name."""
        found = re.fullmatch(f"{_NAME}(-[0-9a-f]{{8}})?", name)
        return None if found is None else cls(found[1], int(found[2]))


def is_packet_folder(name: str) -> bool:
    return re.fullmatch(PACKET_FOLDER, name) is not None
