"""A packet: what changed on all servers of a training job between two cuts, as its manifest tells it.

A stream of packets has numbers without gaps. Packet N brings rows that are as at packet N - 1, or newer, to
what they were at its cut. Where that cannot be, a *restart* stands in the sequence instead and says what the
packets behind it follow; every stream begins with one. Layout: docs/incremental_updates.md, "Format".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from persia._version import __version__
from persia.errors import CorruptionError
from persia.messaging.payloads import json_int
from persia.storage.checksummed_json import decode_document, encode_document
from persia.storage.fields import as_object, bool_at, hex_at, list_at, number_at, text_at
from persia.storage.manifest import NUM_VIRTUAL_SHARDS, FileEntry, ServerEntry, is_dump_id, is_file_name
from persia.storage.position import Position, is_packet_folder
from persia.storage.schema import RowSchema

__all__ = ["Base", "BaseKind", "CheckpointReference", "Packet", "rows_of_packet"]

_FORMAT = "persia packet"


class BaseKind(Enum):
    """What rows must be for the packets behind a restart."""

    NOTHING = "nothing"  # none: drop all
    CHECKPOINT = "checkpoint"  # those of the checkpoint `dump_id`, which the trainer has loaded
    POSITION = "position"  # those of a checkpoint whose position is the restart's own or a later one


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a restart says. A checkpoint of the restart's own position or a later one is always good, too."""

    kind: BaseKind
    reason: str  # for people: why the packets before it are not followed
    dump_id: str | None = None  # of CHECKPOINT: its `manifest.embeddings.dump_id`

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "reason": self.reason, "dump_id": self.dump_id}

    @classmethod
    def from_json(cls, values: object, what: str) -> Base:
        values = as_object(values, f"{what}: base")
        try:
            kind = BaseKind(values.get("kind"))
        except ValueError as failure:
            raise CorruptionError(f"{what}: base: {failure}") from failure
        dump_id = values.get("dump_id")
        if (kind is BaseKind.CHECKPOINT) != (dump_id is not None):
            raise CorruptionError(f"{what}: base of kind {kind.value!r} has dump_id {dump_id!r:.80}")
        if dump_id is not None and not (isinstance(dump_id, str) and is_dump_id(dump_id)):
            raise CorruptionError(f"{what}: base: {dump_id!r:.80} is no dump id")
        return cls(kind=kind, reason=text_at(values, "reason", what), dump_id=dump_id)


@dataclass(frozen=True, kw_only=True)
class CheckpointReference:
    """The newest whole checkpoint that the trainer has dumped since the stream began."""

    url: str  # as the trainer calls it
    dump_id: str
    number: int  # its position in this stream

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, values: object, what: str) -> CheckpointReference:
        values = as_object(values, f"{what}: checkpoint")
        return cls(
            url=text_at(values, "url", what),
            dump_id=text_at(values, "dump_id", what),
            number=json_int(values, "number", what),
        )


@dataclass(frozen=True, kw_only=True)
class Packet:
    """A manifest. `base` makes it a restart, which has no rows and may have dense files."""

    position: Position
    changed_after: float  # seconds since 1970 by the trainer's clock: no change in it was made before
    cut_at: float  # all changes in it were made before; of a restart, when it was written
    step: int | None = None  # of the training loop
    base: Base | None = None
    is_from_nothing: bool = False  # all rows were cleared after the packet before: drop them first
    train_config: str | None = None  # `TrainConfig.encode()` in hex; a restart has none
    schema: RowSchema | None = None  # None: the servers were started without an embedding config
    servers: tuple[ServerEntry, ...] = ()  # by index; rows and removals together
    files: tuple[FileEntry, ...] = ()  # of kind "changes", below `packets/`; any number for each server
    dense: Mapping[str, FileEntry] = field(default_factory=dict)  # as in a checkpoint: dense.pt
    dense_step: int | None = None  # the step of the dense files
    checkpoint: CheckpointReference | None = None
    created_by: str = field(default=f"persia {__version__}")

    @property
    def is_restart(self) -> bool:
        return self.base is not None

    @property
    def num_rows(self) -> int:
        """Changed and removed."""
        return sum(file.num_rows for file in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in (*self.files, *self.dense.values()))

    def encode(self) -> bytes:
        values = {
            "created_by": self.created_by,
            **self.position.to_json(),
            "changed_after": self.changed_after,
            "cut_at": self.cut_at,
            "step": self.step,
            "base": None if self.base is None else self.base.to_json(),
            "is_from_nothing": self.is_from_nothing,
            "num_virtual_shards": NUM_VIRTUAL_SHARDS,
            "train_config": self.train_config,
            "schema": None if self.schema is None else self.schema.to_json(),
            "servers": [dict(server.__dict__) for server in self.servers],
            "files": [file.to_json() for file in self.files],
            "dense": {name: file.to_json() for name, file in self.dense.items()},
            "dense_step": self.dense_step,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.to_json(),
        }
        return encode_document(_FORMAT, values)

    @classmethod
    def decode(cls, content: bytes, what: str) -> Packet:
        """Raises CorruptionError, naming `what`, for anything but a packet of a known version."""
        values = decode_document(content, what, form=_FORMAT)
        if json_int(values, "num_virtual_shards", what) != NUM_VIRTUAL_SHARDS:
            raise CorruptionError(
                f"{what}: num_virtual_shards is {values['num_virtual_shards']}, not {NUM_VIRTUAL_SHARDS}"
            )
        base, checkpoint = values.get("base"), values.get("checkpoint")
        packet = cls(
            position=Position.from_json(values, what),
            changed_after=number_at(values, "changed_after", what),
            cut_at=number_at(values, "cut_at", what),
            step=_optional_int(values, "step", what),
            base=None if base is None else Base.from_json(base, what),
            **rows_of_packet(values, what),
            dense=_dense(values, what),
            dense_step=_optional_int(values, "dense_step", what),
            checkpoint=None if checkpoint is None else CheckpointReference.from_json(checkpoint, what),
            created_by=text_at(values, "created_by", what),
        )
        packet._check(what)
        return packet

    def _check(self, what: str) -> None:
        """That its parts go together."""
        if self.position.number == 0:
            raise CorruptionError(f"{what}: number is 0, packets count from 1")
        if self.position.number == 1 and not self.is_restart:
            raise CorruptionError(f"{what}: a stream's first packet must say what it follows")
        if self.is_restart and (self.files or self.is_from_nothing):
            raise CorruptionError(f"{what}: it says what packets follow, and has rows itself")
        if self.files and self.train_config is None:
            raise CorruptionError(f"{what}: it has rows, and no train_config")
        if self.num_rows != sum(server.num_rows for server in self.servers):
            raise CorruptionError(f"{what}: its files have {self.num_rows} rows, its servers sent others")
        for file in (*self.files, *self.dense.values()):
            folder, _, _ = file.path.partition("/")
            if not is_packet_folder(folder) or Position.parse(folder) != self.position:
                raise CorruptionError(f"{what}: {file.path!r:.120} is no file of packet {self.position}")


def rows_of_packet(values: dict[str, Any], what: str) -> dict[str, Any]:
    """The parts of a manifest that tell of its rows, as arguments of `Packet`."""
    schema = values.get("schema")
    return {
        "is_from_nothing": bool_at(values, "is_from_nothing", what),
        "train_config": hex_at(values, "train_config", what),
        "schema": None if schema is None else RowSchema.from_json(schema, what),
        "servers": tuple(_server(entry, what) for entry in list_at(values, "servers", what)),
        "files": tuple(FileEntry.from_json(file, what) for file in list_at(values, "files", what)),
    }


def _server(values: object, what: str) -> ServerEntry:
    entry = as_object(values, f"{what}: server")
    return ServerEntry(step=json_int(entry, "step", what), num_rows=json_int(entry, "num_rows", what))


def _dense(values: dict[str, Any], what: str) -> dict[str, FileEntry]:
    files = as_object(values.get("dense"), f"{what}: dense")
    for name in files:
        if not is_file_name(name):
            raise CorruptionError(f"{what}: dense: {name!r:.80} is no file name")
    return {name: FileEntry.from_json(file, what) for name, file in files.items()}


def _optional_int(values: dict[str, Any], key: str, what: str) -> int | None:
    return None if values.get(key) is None else json_int(values, key, what)
