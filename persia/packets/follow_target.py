"""The packet that followers should be at, and the checkpoints that they can start from.

A file `pin` beside the packets names one, as `latest` does: all followers of the directory stay at that
packet, or go back to it. Without the file they follow the newest one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from persia.checkpoint.checkpoints import Source
from persia.errors import CorruptionError, NotFoundError, PersiaError, UntrustedError
from persia.packets.log import PacketLog
from persia.packets.packet import BaseKind
from persia.storage.checksummed_json import read_pointer
from persia.storage.location import Location
from persia.storage.manifest import Manifest
from persia.storage.position import Position
from persia.storage.versions import checkpoints_at

PIN_NAME = "pin"

_Found = tuple[Position | None, str, Location]  # position, dump id of the rows, directory of a checkpoint


@dataclass(frozen=True, kw_only=True)
class FollowTarget:
    """The packet that followers should be at."""

    position: Position
    latest: Position
    is_pinned: bool


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Rows with all packets of a stream up to `position` in them."""

    source: Source | None  # None: no rows at all
    position: Position
    restart: Position | None = None  # the packet whose base it is


def read_target(log: PacketLog) -> FollowTarget | None:
    """None if no packet has been written. StorageError, CorruptionError."""
    latest = log.newest()
    if latest is None:
        return None
    path = log.location / PIN_NAME
    try:
        name = read_pointer(path)
    except NotFoundError:
        return FollowTarget(position=latest, latest=latest, is_pinned=False)
    pin = Position.parse(name)
    # Not ignored: a follower that a typing mistake has let loose would serve what was to be held back.
    if pin is None:
        raise CorruptionError(
            f"{path} says {name!r:.80}, which is no packet's name; write one as `latest` has, or remove it"
        )
    # A pin may also name a packet of an earlier stream: the model before a restart of the training.
    if pin.stream == latest.stream:
        pin = min(pin, latest)  # what is not written yet cannot be reached
    return FollowTarget(position=pin, latest=latest, is_pinned=True)


def checkpoint_places(log: PacketLog, configured: Location | None, target: FollowTarget) -> list[Location]:
    """Directories with checkpoints: configured, beside the packets, and the training's own."""
    places = [log.checkpoints] if configured is None else [configured, log.checkpoints]
    with contextlib.suppress(PersiaError):
        dumped = log.read(target.latest).checkpoint
        if dumped is not None:
            places.append(Location.of(dumped.url))
    return places


def find_starts(
    log: PacketLog, places: Sequence[Location], target: Position, at_least: int
) -> list[StartPoint]:
    """Start points in the target's stream up to the target that have packet `at_least`; the newest first.

    `places`: checkpoints, or directories of them. NotFoundError: there is none.
    """
    found, refused = _checkpoints(places)
    starts = [
        StartPoint(source=Source(location), position=position)
        for position, _, location in found
        if position is not None
        and position.stream == target.stream
        and at_least <= position.number <= target.number
    ]
    starts.sort(key=lambda start: start.position, reverse=True)
    first = Position(target.stream, max(at_least, 1))
    # A restart names the checkpoint that it follows, which may have been dumped by another stream.
    starts += _bases(log, first, found)
    if not starts:
        raise NotFoundError(
            f"there is no checkpoint with packet {first} and none after {target.number} in "
            f"{' or '.join(str(place) for place in places)}{refused}"
        )
    return starts


def _bases(log: PacketLog, restart: Position, found: Sequence[_Found]) -> list[StartPoint]:
    try:
        base = log.read(restart).base
    except (NotFoundError, CorruptionError):
        return []
    before = Position(restart.stream, restart.number - 1)
    if base is not None and base.kind is BaseKind.NOTHING:
        return [StartPoint(source=None, position=before, restart=restart)]
    return [
        StartPoint(source=Source(location), position=before, restart=restart)
        for _, dump_id, location in found
        if base is not None and base.kind is BaseKind.CHECKPOINT and dump_id == base.dump_id
    ]


def _checkpoints(places: Sequence[Location]) -> tuple[list[_Found], str]:
    """What can be used, and why one of the others is not trusted."""
    found: list[_Found] = []
    refused = ""
    for place in places:
        for location in checkpoints_at(place):
            try:
                section = Manifest.read(location)[0].embeddings
            except UntrustedError as failure:
                refused = f"; {failure}"
                continue
            except (NotFoundError, CorruptionError):
                continue  # removed meanwhile, or damaged: another one may do
            if section is not None:
                found.append((section.packets, section.dump_id, location))
    return found, refused
