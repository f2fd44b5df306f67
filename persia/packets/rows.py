"""Brings the rows of one server's packets into its store, whatever number of servers wrote them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.server_job import RowStore, ServerShare
from persia.errors import FailedPreconditionError, InternalError
from persia.packets.packet import BaseKind, Packet
from persia.storage.location import Location
from persia.storage.manifest import FileEntry
from persia.storage.shard_file import ShardFile

if TYPE_CHECKING:
    from persia._native import CheckpointLoader, TrainConfig

__all__ = ["FollowingStore", "PacketRows", "clear_rows", "replace_rows"]

_HEAD_BYTES = 256
_READ_BYTES = 8 << 20


class FollowingStore(RowStore, Protocol):
    """What following needs of the native module."""

    def begin_apply(
        self, train_config: TrainConfig, *, is_from_nothing: bool = False, with_state: bool = True
    ) -> CheckpointLoader: ...


class PacketRows:
    """Of one store, which only answers lookups: without the optimizer's state."""

    def __init__(self, store: FollowingStore, share: ServerShare) -> None:
        """`share`: which rows are the store's; its own `store` is not used."""
        self._store = store
        self._share = share
        self._loader: CheckpointLoader | None = None

    def prepare(self, files: Location, packet: Packet) -> Callable[[], None]:
        """Reads this server's rows of a packet below `files`, and checks them. What is returned applies all
        of them in one step: a batch's lookup sees the packet or does not. Call it soon: the store takes
        nothing else meanwhile.

        NotFoundError, CorruptionError: name the file; FailedPreconditionError: rows of other slots.
        """
        from persia._native import TrainConfig

        self._check_schema(packet)
        is_from_nothing = packet.is_from_nothing or _drops_all(packet)
        if packet.train_config is None:
            config = TrainConfig(optimizer="sgd", lr=1.0)  # there are no rows that it could be about
        else:
            config = TrainConfig.decode(bytes.fromhex(packet.train_config))
        # Held by this alone: a name in a frame of an error's traceback would keep the store locked.
        self._loader = self._store.begin_apply(config, is_from_nothing=is_from_nothing, with_state=False)
        try:
            self._read(files, packet)
        except BaseException:
            self._loader = None
            raise

        def apply() -> None:
            try:
                self._apply()
            finally:
                self._loader = None

        return apply

    def _apply(self) -> None:
        assert self._loader is not None, "it is applied once"
        self._loader.apply()
        self._loader.commit()

    def _check_schema(self, packet: Packet) -> None:
        if packet.schema is None or self._share.schema is None:
            return
        changes = packet.schema.changes_to(self._share.schema)
        if changes:
            raise FailedPreconditionError(
                f"{changes} since packet {packet.position} was written: start the follower with the "
                "training's embedding config"
            )

    def _read(self, files: Location, packet: Packet) -> None:
        """Prepares this server's blocks of all files."""
        if len(packet.files) < 2:
            for entry in packet.files:
                self._read_file(files, entry)
            return
        with ThreadPoolExecutor(self._share.num_threads, "persia-packet") as pool:
            list(pool.map(lambda entry: self._read_file(files, entry), packet.files))

    def _read_file(self, files: Location, entry: FileEntry) -> None:
        file = ShardFile(files, entry)
        for chunk in file.chunks_of(self._is_mine):
            with file.naming(chunk):
                self._prepare(file.read(chunk))

    def _prepare(self, chunk: bytes) -> None:
        assert self._loader is not None, "it is made before files are read"
        self._loader.prepare(chunk)

    def _is_mine(self, shards: NDArray[np.uint32]) -> NDArray[np.bool_]:
        mine: NDArray[np.bool_] = shards % self._share.replicas == self._share.index
        return mine


def clear_rows(store: RowStore) -> None:
    """An empty store that packets may be applied to."""
    from persia._native import TrainConfig

    loader = store.begin_load(TrainConfig(optimizer="sgd", lr=1.0), with_state=False)
    loader.replace()
    loader.commit()


def replace_rows(store: FollowingStore, rows: RowStore) -> None:
    """Puts the rows of one store in the place of another's, in one step: lookups wait, none sees a part.

    Needs memory for both, and for the rows in between.
    """
    from persia import _native

    snapshot = rows.begin_snapshot()
    part = snapshot.part(0)
    pieces = []
    while piece := part.read(_READ_BYTES):
        pieces.append(piece)
    config = snapshot.train_config
    snapshot.close()
    if config is None:
        raise InternalError("rows without a config are no one's")
    content = memoryview(b"".join(pieces))
    del pieces
    begin = _native.parse_checkpoint_header(content[:_HEAD_BYTES])["header_bytes"]
    end, _ = _native.parse_checkpoint_trailer(content[-_native.CHECKPOINT_TRAILER_BYTES :])
    assert isinstance(begin, int), "as the stub says of it"
    loader = store.begin_apply(config, is_from_nothing=True, with_state=False)
    loader.prepare(content[begin:end])
    loader.apply()
    loader.commit()


def _drops_all(packet: Packet) -> bool:
    return packet.base is not None and packet.base.kind is BaseKind.NOTHING
