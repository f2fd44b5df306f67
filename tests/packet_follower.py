"""The least that follows packets, with a store of this process: what tests compare a trainer with."""

from __future__ import annotations

from typing import Any

from persia import _native
from persia.checkpoint.rows import Span
from persia.packets.log import PacketLog
from persia.packets.packet import BaseKind, Packet
from persia.storage.position import Position
from persia.storage.shard_file import ShardFile


class Follower:
    """`bags`: anything native that has a store. Who loads a checkpoint says so in `position`, `dump_id`."""

    def __init__(self, log: PacketLog, bags: Any) -> None:
        self.log = log
        self.bags = bags
        self.position: Position | None = None
        self.dump_id: str | None = None

    def follow(self) -> None:
        """Applies every packet up to the newest; reads and checks all of their files."""
        newest = self.log.newest()
        assert newest is not None
        if self.position is None or self.position.stream != newest.stream:
            self.position = Position(newest.stream, 0)
        while self.position < newest:
            self.apply(self.log.read(self.position.next))
            self.position = self.position.next

    def apply(self, packet: Packet) -> None:
        if packet.base is not None:
            assert packet.base.kind is not BaseKind.POSITION, "a checkpoint is needed"
            assert packet.base.dump_id in (None, self.dump_id)
            if packet.base.kind is BaseKind.NOTHING:
                self.bags.clear()
            return
        assert packet.train_config is not None
        config = _native.TrainConfig.decode(bytes.fromhex(packet.train_config))
        loader = self.bags.begin_apply(config, is_from_nothing=packet.is_from_nothing)
        for entry in packet.files:
            file = ShardFile(self.log.files, entry)
            for chunk in file.chunks_of(Span()):
                loader.prepare(file.read(chunk))
        loader.apply()
        loader.commit()
