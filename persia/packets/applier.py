"""Brings the rows of one server's packets into its store, whatever number of servers wrote them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from persia.checkpoint.server_job import ServerShare
from persia.errors import FailedPreconditionError, InternalError
from persia.packets.packet import BaseKind, Packet
from persia.rows.reader import snapshot_blocks
from persia.storage.location import Location
from persia.storage.manifest import FileEntry
from persia.storage.shard_file import ShardFile

if TYPE_CHECKING:
    from persia._native import CheckpointLoader, EmbeddingStore


class PacketApplier:
    """Applies packets to a store that only answers lookups: without the optimizer's state."""

    def __init__(self, share: ServerShare) -> None:
        self._share = share
        self._loader: CheckpointLoader | None = None

    def prepare(self, files: Location, packet: Packet) -> Callable[[], None]:
        """Reads this server's rows of a packet below `files`, and checks them. The result applies
        all of them in one step: a lookup sees the whole packet or nothing of it. Call it soon: until then the
        store is locked for other loads.

        NotFoundError, CorruptionError: name the file; FailedPreconditionError: rows of other slots.
        """
        from persia._native import TrainConfig

        self._check_schema(packet)
        is_from_nothing = packet.is_from_nothing or (
            packet.base is not None and packet.base.kind is BaseKind.NOTHING
        )
        if packet.train_config is None:
            config = TrainConfig(optimizer="sgd", lr=1.0)  # there are no rows that it could be about
        else:
            config = TrainConfig.decode(bytes.fromhex(packet.train_config))
        # Held by this alone: a name in a frame of an error's traceback would keep the store locked.
        self._loader = self._share.store.begin_apply(
            config, is_from_nothing=is_from_nothing, with_state=False
        )
        try:
            self._read(files, packet)
        except BaseException:
            self._loader = None
            raise

        def apply() -> None:
            assert self._loader is not None, "it is applied once"
            try:
                self._loader.apply()
                self._loader.commit()
            finally:
                self._loader = None

        return apply

    def _check_schema(self, packet: Packet) -> None:
        # Of every packet, also without rows: a follower with other slots is to fail at its start.
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
        # One file for each server of the training, read at the same time: requests wait for the storage.
        with ThreadPoolExecutor(self._share.num_threads, "persia-packet") as pool:
            list(pool.map(lambda entry: self._read_file(files, entry), packet.files))

    def _read_file(self, files: Location, entry: FileEntry) -> None:
        assert self._loader is not None, "it is made before files are read"
        file = ShardFile(files, entry)
        for chunk in file.chunks_of(self._share.owns):
            with file.naming(chunk):
                self._loader.prepare(file.read(chunk))


def clear_rows(store: EmbeddingStore) -> None:
    """An empty store that packets may be applied to."""
    from persia._native import TrainConfig

    # As a load of no rows: it replaces all in one step.
    loader = store.begin_load(TrainConfig(optimizer="sgd", lr=1.0), with_state=False)
    loader.replace()
    loader.commit()


def replace_rows(store: EmbeddingStore, rows: EmbeddingStore) -> None:
    """Puts the rows of one store in the place of another's, in one step: lookups wait, none sees a part.

    Needs memory for both, and for the rows in between.
    """
    snapshot = rows.begin_snapshot()
    blocks = snapshot_blocks(snapshot.part(0))
    config = snapshot.train_config
    snapshot.close()
    if config is None:
        raise InternalError("a store with rows has no train config")
    loader = store.begin_apply(config, is_from_nothing=True, with_state=False)
    loader.prepare(blocks)
    loader.apply()
    loader.commit()
