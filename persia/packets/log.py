"""A directory of packets, on any storage: written by one trainer at a time, read by any number of followers.

incremental_dir/
  latest                                    the name of the newest packet, replaced last
  manifests/packet-<stream>-<number>.json   makes a packet exist: it appears once all its files are there
  packets/packet-<stream>-<number>-<id>/    the files of a packet
  checkpoints/                              whole checkpoints that followers begin with (versions.py)
"""

from __future__ import annotations

import re
from typing import Any

from persia.errors import CorruptionError, NotFoundError, StorageError
from persia.logger import get_default_logger
from persia.packets.packet import Packet
from persia.storage.checksummed_json import encode_pointer, read_pointer, verify_document
from persia.storage.location import Location
from persia.storage.position import STREAM, Position
from persia.storage.signing import signer, trusted_keys

LATEST_NAME = "latest"
_ENDING = ".json"
_MAX_MANIFEST_BYTES = 64 << 20
_MAX_LINEAGE = 64


class PacketLog:
    """Reads, lists, adds and removes packets. Not thread-safe."""

    def __init__(self, url: Any) -> None:
        self.location = Location.of(url)
        self.files = self.location / "packets"  # what paths in a packet's manifest are below
        self.checkpoints = self.location / "checkpoints"
        self._manifests = self.location / "manifests"

    def read(self, position: Position) -> Packet:
        """NotFoundError: no such packet (yet, or no more); CorruptionError names file and reason.

        UntrustedError: it is not signed by one of the keys of PERSIA_VERIFY_KEY.
        """
        path = self._manifest(position)
        try:
            content = path.read_replaced(max_bytes=_MAX_MANIFEST_BYTES)
        except NotFoundError as failure:
            raise NotFoundError(f"there is no packet {position} in {self.location}") from failure
        keys = trusted_keys()
        verify_document(content, str(path), keys)
        packet = Packet.decode(content, str(path))
        if keys is not None:
            packet.require_pages(str(path))
        # A manifest that was copied or renamed by hand would apply the wrong changes.
        if packet.position != position:
            raise CorruptionError(f"{path} is of packet {packet.position}")
        return packet

    def exists(self, position: Position) -> bool:
        return self._manifest(position).exists_replaced()

    def newest(self) -> Position | None:
        """The last packet of the stream that was started last; None: there is none."""
        found = self._pointed()
        if found is None:
            return max(self.positions(), default=None)
        # A trainer that was killed may have added packets after it last replaced the pointer.
        while self.exists(found.next):
            found = found.next
        return found

    def positions(self, stream: str | None = None) -> list[Position]:
        """All packets, or those of one stream, ascending. Lists a directory, which is slow."""
        named = (child.name for child in self._manifests.children())
        found = {Position.parse(name.removesuffix(_ENDING)) for name in named if name.endswith(_ENDING)}
        return sorted(p for p in found if p is not None and stream in (None, p.stream))

    def lineage(self, stream: str) -> list[str]:
        """The streams and dump ids that the rows of a stream come from, the nearest first.

        It ends at a stream whose first packet is gone.
        """
        found: list[str] = []
        pending = [stream]
        while pending and len(found) < _MAX_LINEAGE:
            try:
                base = self.read(Position(pending.pop(), 1)).base
            except (NotFoundError, CorruptionError):
                continue
            new = [name for name in (() if base is None else base.origin) if name not in found]
            found += new
            pending += [name for name in new if re.fullmatch(STREAM, name)]
        return found

    def add(self, packet: Packet) -> None:
        """Makes a packet exist whose files are there. StorageError: as far as is known it does not."""
        self._manifest(packet.position).replace(packet.encode(signer()))
        try:
            (self.location / LATEST_NAME).replace(encode_pointer(packet.position.name))
        except StorageError as failure:  # `newest` looks beyond the pointer, so it may be late
            get_default_logger().warning("packet %s is written, but: %s", packet.position, failure)

    def remove_until(self, last: Position) -> None:
        """Removes the packets of a stream up to `last`, those of the streams that it continues, and the files
        of failed attempts. Manifests first: a follower never sees a packet without its files.

        Packets of other streams stay: followers may hold at one of them, or go back to it.
        """
        streams = {last.stream, *self.lineage(last.stream)}
        # Each quietly: what cannot be removed now is removed with the next checkpoint, as it is listed again.
        # The latest first: the first packet of a stream tells which streams it continues.
        kept = set()
        for position in reversed(self.positions()):
            if position.stream in streams and position <= last:
                self._manifest(position).remove_quietly()
            else:
                kept.add(position)
        for folder in self.files.children():
            meant = Position.parse(folder.name)
            if meant is not None and meant <= last and meant not in kept:
                folder.remove_quietly()

    def _manifest(self, position: Position) -> Location:
        return self._manifests / f"{position.name}{_ENDING}"

    def _pointed(self) -> Position | None:
        pointer = self.location / LATEST_NAME
        try:
            name = read_pointer(pointer)
        except NotFoundError:
            return None
        position = Position.parse(name)
        if position is None or position.name != name:
            raise CorruptionError(f"{pointer} says {name!r:.80}, not the name of a packet")
        return position
