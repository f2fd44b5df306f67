"""manifest.json: what makes a set of files a checkpoint.

Every dump writes files of its own, in a folder named after it; the manifest names those that count, with
their sizes and checksums, and is replaced in one step. Whoever reads it sees the checkpoint before a dump or
the one after it, never something between. Layout: docs/checkpoint_format.md, "Manifest".
"""

from __future__ import annotations

import datetime
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from persia._version import __version__
from persia.errors import CorruptionError, FailedPreconditionError, InvalidArgumentError, NotFoundError
from persia.messaging.payloads import json_int
from persia.storage.checksummed_json import decode_document, encode_document
from persia.storage.fields import as_object, bool_at, hex_at, list_at, text_at
from persia.storage.location import Location
from persia.storage.position import Position, is_packet_folder
from persia.storage.schema import RowSchema

__all__ = [
    "MANIFEST_NAME",
    "MAX_MANIFEST_BYTES",
    "NUM_VIRTUAL_SHARDS",
    "DenseSection",
    "EmbeddingSection",
    "FileEntry",
    "Manifest",
    "ServerEntry",
    "is_dump_id",
    "make_dump_id",
    "utc_now",
]

MANIFEST_NAME = "manifest.json"
NUM_VIRTUAL_SHARDS = 4096

_FORMAT = "persia checkpoint"
MAX_MANIFEST_BYTES = 64 << 20
_DUMP_ID = re.compile(r"dump-\d{8}T\d{6}Z-[0-9a-f]{8}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def utc_now() -> str:
    """Seconds since 1970 for people: 2026-01-31T12:00:00Z."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_dump_id() -> str:
    """The name of a dump's folder: unlike all others, sorted by time."""
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return f"dump-{stamp}-{secrets.token_hex(4)}"


def is_dump_id(name: str) -> bool:
    return _DUMP_ID.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint."""

    path: str  # below the checkpoint's directory: <dump id>/<name>
    num_bytes: int
    checksum: str  # SHA-256 in hex; of rows: of header, footer and trailer, which hold all others
    num_rows: int = 0

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, values: object, what: str) -> FileEntry:
        values = as_object(values, what)
        path, checksum = text_at(values, "path", what), text_at(values, "checksum", what)
        folder, _, name = path.partition("/")
        # A manifest may come from anywhere: its paths must not lead out of the checkpoint.
        if not ((is_dump_id(folder) or is_packet_folder(folder)) and is_file_name(name)):
            raise CorruptionError(f"{what}: path {path!r:.80} is not <dump id>/<file name>")
        return cls(
            path=path,
            num_bytes=json_int(values, "num_bytes", what),
            checksum=checksum,
            num_rows=json_int(values, "num_rows", what),
        )


@dataclass(frozen=True, kw_only=True)
class ServerEntry:
    """What one parameter server held at the cut."""

    step: int  # updates that it had applied; of rows in place the number of its pool's checkpoint
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class EmbeddingSection:
    """The rows."""

    dump_id: str
    created_at: str
    train_config: str | None  # `TrainConfig.encode()` in hex; None: the servers were never configured
    schema: RowSchema | None  # None: the servers were started without an embedding config
    servers: tuple[ServerEntry, ...]  # by index
    files: tuple[FileEntry, ...]
    optimizer: Mapping[str, Any] | None = None  # its settings for people, when the context knew them
    packets: Position | None = None  # the last packet whose changes are all in these rows
    has_state: bool = True  # of the optimizer
    in_place: bool = False  # in the servers' pools, and in no files

    def require_files(self, directory: Location) -> None:
        """FailedPreconditionError: only the servers that have the rows can go back to them."""
        if self.in_place:
            raise FailedPreconditionError(
                f"the rows of {directory} are in the pools of the servers that trained them, and in no "
                "files: start a job over these pools, load it there, and dump to files"
            )

    @property
    def num_rows(self) -> int:
        return sum(server.num_rows for server in self.servers)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def to_json(self) -> dict[str, Any]:
        return {
            "dump_id": self.dump_id,
            "created_at": self.created_at,
            "num_virtual_shards": NUM_VIRTUAL_SHARDS,
            "num_rows": self.num_rows,
            "in_place": self.in_place,
            "optimizer": self.optimizer,
            "has_state": self.has_state,
            "packets": None if self.packets is None else self.packets.to_json(),
            "train_config": self.train_config,
            "schema": None if self.schema is None else self.schema.to_json(),
            "servers": [dict(server.__dict__) for server in self.servers],
            "files": [file.to_json() for file in self.files],
        }

    @classmethod
    def from_json(cls, values: object, what: str) -> EmbeddingSection:
        values = as_object(values, f"{what}: embeddings")
        if json_int(values, "num_virtual_shards", what) != NUM_VIRTUAL_SHARDS:
            raise CorruptionError(
                f"{what}: num_virtual_shards is {values['num_virtual_shards']}, not {NUM_VIRTUAL_SHARDS}"
            )
        servers = []
        for entry in list_at(values, "servers", what):
            entry = as_object(entry, f"{what}: server")
            servers.append(
                ServerEntry(step=json_int(entry, "step", what), num_rows=json_int(entry, "num_rows", what))
            )
        schema, optimizer = values.get("schema"), values.get("optimizer")
        packets = values.get("packets")
        section = cls(
            dump_id=text_at(values, "dump_id", what),
            created_at=text_at(values, "created_at", what),
            train_config=hex_at(values, "train_config", what),
            schema=None if schema is None else RowSchema.from_json(schema, what),
            servers=tuple(servers),
            files=tuple(FileEntry.from_json(file, what) for file in list_at(values, "files", what)),
            optimizer=None if optimizer is None else as_object(optimizer, f"{what}: optimizer"),
            packets=None if packets is None else Position.from_json(packets, what),
            has_state="has_state" not in values or bool_at(values, "has_state", what),  # from version 2 on
            in_place=values.get("in_place") is True,
        )
        if section.in_place and section.files:
            raise CorruptionError(f"{what}: its rows are in place, and it names files of rows")
        if not section.in_place and sum(file.num_rows for file in section.files) != section.num_rows:
            raise CorruptionError(
                f"{what}: its files have {sum(file.num_rows for file in section.files)} rows, its servers "
                f"had {section.num_rows}"
            )
        return section


@dataclass(frozen=True, kw_only=True)
class DenseSection:
    """The torch files, under the names that the script gave them."""

    dump_id: str
    created_at: str
    files: Mapping[str, FileEntry]

    def to_json(self) -> dict[str, Any]:
        files = {name: file.to_json() for name, file in self.files.items()}
        return {"dump_id": self.dump_id, "created_at": self.created_at, "files": files}

    @classmethod
    def from_json(cls, values: object, what: str) -> DenseSection:
        values = as_object(values, f"{what}: dense")
        files = as_object(values.get("files"), f"{what}: dense files")
        return cls(
            dump_id=text_at(values, "dump_id", what),
            created_at=text_at(values, "created_at", what),
            files={name: FileEntry.from_json(file, what) for name, file in files.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint. Its parts may come from different dumps: `dump_embedding` renews one of them."""

    step: int | None = None  # of the training loop, as the script or its context counts
    dense: DenseSection | None = None
    embeddings: EmbeddingSection | None = None
    created_by: str = field(default=f"persia {__version__}")

    @property
    def dump_ids(self) -> set[str]:
        """The folders that it needs."""
        return {section.dump_id for section in (self.dense, self.embeddings) if section is not None}

    @property
    def paths(self) -> set[str]:
        """All its files."""
        dense = () if self.dense is None else self.dense.files.values()
        rows = () if self.embeddings is None else self.embeddings.files
        return {file.path for file in (*dense, *rows)}

    def updated(
        self, step: int | None, dense: DenseSection | None, embeddings: EmbeddingSection | None
    ) -> Manifest:
        """With what a dump has written in place of what was there; None leaves a part as it is."""
        return replace(
            self,
            step=self.step if step is None else step,
            dense=dense or self.dense,
            embeddings=embeddings or self.embeddings,
            created_by=f"persia {__version__}",
        )

    def encode(self) -> bytes:
        values = {
            "created_by": self.created_by,
            "step": self.step,
            "dense": None if self.dense is None else self.dense.to_json(),
            "embeddings": None if self.embeddings is None else self.embeddings.to_json(),
        }
        return encode_document(_FORMAT, values)

    @classmethod
    def decode(cls, content: bytes, what: str) -> Manifest:
        """Raises CorruptionError, naming `what`, for anything but a manifest of a known version."""
        values = decode_document(content, what, form=_FORMAT)
        dense, embeddings = values.get("dense"), values.get("embeddings")
        return cls(
            step=None if values.get("step") is None else json_int(values, "step", what),
            dense=None if dense is None else DenseSection.from_json(dense, what),
            embeddings=None if embeddings is None else EmbeddingSection.from_json(embeddings, what),
            created_by=text_at(values, "created_by", what),
        )

    @classmethod
    def read(cls, directory: Location) -> tuple[Manifest, str]:
        """The manifest of a checkpoint and its digest; NotFoundError: there is none."""
        path = directory / MANIFEST_NAME
        try:
            content = path.read_replaced(max_bytes=MAX_MANIFEST_BYTES)
        except NotFoundError as failure:
            raise NotFoundError(
                f"{directory} is no checkpoint: it has no {MANIFEST_NAME}. Check the path; a dump that was "
                "broken off leaves none"
            ) from failure
        return cls.decode(content, str(path)), hashlib.sha256(content).hexdigest()


def is_file_name(name: str) -> bool:
    return _FILE_NAME.fullmatch(name) is not None and not name.startswith(".")


def check_file_name(name: str) -> str:
    """For names that scripts give to dense files."""
    if not is_file_name(name) or name == MANIFEST_NAME or is_dump_id(name):
        raise InvalidArgumentError(
            f"{name!r} is not usable as the name of a checkpoint's file: use letters, digits, '.', '_', '-'"
        )
    return name
