"""manifest.json: what makes a set of files a checkpoint.

Every dump writes files of its own, in a folder named after it. The manifest names the files of the
checkpoint, with their sizes and checksums, and is replaced in one step. A reader sees the checkpoint before a
dump or the one after it, never a mixture. Layout: docs/checkpoint_format.md, "Manifest".
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, computed_field, model_validator

from persia._version import __version__
from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UntrustedError,
)
from persia.pipeline.position import DataPosition
from persia.storage.checksummed_json import decode_document, encode_document, verify_document
from persia.storage.location import Location
from persia.storage.pages import PAGES_ENDING
from persia.storage.position import PACKET_FOLDER, STREAM, Position, make_stream_id
from persia.storage.schema import RowSchema
from persia.storage.signature import Signature
from persia.storage.signing import Signer, TrustedKeys, trusted_keys
from persia.validation import Count, Hex, read_document, require_keys, to_json

MANIFEST_NAME = "manifest.json"
NUM_VIRTUAL_SHARDS: Final = 4096

_FORMAT = "persia checkpoint"
MAX_MANIFEST_BYTES = 64 << 20
# Names that become paths on the storage. A manifest may come from anywhere: nothing that leads out of the
# checkpoint may match.
_DUMP_ID = f"dump-{STREAM}"
_FILE_NAME = "[A-Za-z0-9_-][A-Za-z0-9_.-]*"

DumpId = Annotated[str, Field(pattern=f"^{_DUMP_ID}$")]
FileName = Annotated[str, Field(pattern=f"^{_FILE_NAME}$")]


def utc_now() -> str:
    """Seconds since 1970 for people: 2026-01-31T12:00:00Z."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_dump_id() -> str:
    """The name of a dump's folder: unlike all others, sorted by time."""
    return f"dump-{make_stream_id()}"


def is_dump_id(name: str) -> bool:
    return re.fullmatch(_DUMP_ID, name) is not None


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint."""

    # Below the checkpoint's directory, or that of packets.
    path: Annotated[str, Field(pattern=f"^({_DUMP_ID}|{PACKET_FOLDER})/{_FILE_NAME}$")]
    num_bytes: Count
    checksum: str  # SHA-256 in hex; of rows: of header, footer and trailer, which hold all others
    num_rows: Count  # 0 of a dense file
    pages: str | None = None  # of rows that are signed: SHA-256 in hex of the file `path`.pages (pages.py)


@dataclass(frozen=True, kw_only=True)
class ServerEntry:
    """What one parameter server held at the snapshot point."""

    step: Count  # updates that it had applied; of rows in place the number of its tier's checkpoint
    num_rows: Count


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """Rows that all servers of a job have written: those of a checkpoint, or of a packet."""

    train_config: Hex | None = None  # `TrainConfig.encode()` in hex; None: the servers were never configured
    schema: RowSchema | None = None  # None: the servers were started without an embedding config
    servers: tuple[ServerEntry, ...] = ()  # by index
    files: tuple[FileEntry, ...] = ()  # any number for each server
    num_virtual_shards: Literal[4096] = NUM_VIRTUAL_SHARDS

    @computed_field  # type: ignore[prop-decorator]
    @property
    def num_rows(self) -> int:
        return sum(server.num_rows for server in self.servers)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def require_pages(self, what: str) -> None:
        """UntrustedError: a signature would not cover the rows, as their own checksums can be forged."""
        for file in self.files:
            if file.pages is None:
                raise UntrustedError(
                    f"{what} has no digests of the pages of {file.path}: dump it anew, signed"
                )


@dataclass(frozen=True, kw_only=True)
class EmbeddingSection(RowSet):
    """The rows of a checkpoint."""

    dump_id: str
    created_at: str
    optimizer: Mapping[str, Any] | None = None  # its settings for people, when the context knew them
    packets: Position | None = None  # the last packet whose changes are all in these rows
    has_state: StrictBool = True  # of the optimizer
    in_place: StrictBool = False  # in the servers' storage tiers, and in no files

    def require_files(self, directory: Location) -> None:
        """FailedPreconditionError: only the servers that have the rows can go back to them."""
        if self.in_place:
            raise FailedPreconditionError(
                f"the rows of {directory} are in the storage tiers of the servers that trained them, and in "
                "no files: start a job over these tiers, load it there, and dump to files"
            )

    @model_validator(mode="after")
    def _check(self) -> EmbeddingSection:
        if self.in_place and self.files:
            raise CorruptionError("its rows are in place, and it names files of rows")
        # A file that is missing from the list would otherwise lose rows without an error.
        num_rows = sum(file.num_rows for file in self.files)
        if not self.in_place and num_rows != self.num_rows:
            raise CorruptionError(f"its files have {num_rows} rows, its servers had {self.num_rows}")
        return self


@dataclass(frozen=True, kw_only=True)
class DenseSection:
    """The torch files, under the names that the script gave them."""

    dump_id: str
    created_at: str
    files: Mapping[str, FileEntry]
    signature: Signature | None = None  # None: no batch was trained before, or by an older version


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint. Its sections may be of different dumps: `dump_embedding` replaces one of them."""

    step: Count | None = None  # of the training loop, as the script or its context counts
    dense: DenseSection | None = None
    embeddings: EmbeddingSection | None = None
    trained: DataPosition | None = None  # the batches of data loaders at this step; None: not known
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
        return {
            *(file.path for file in (*dense, *rows)),
            *(f"{file.path}{PAGES_ENDING}" for file in rows if file.pages is not None),
        }

    def updated(
        self,
        step: int | None,
        dense: DenseSection | None,
        embeddings: EmbeddingSection | None,
        trained: DataPosition | None = None,
    ) -> Manifest:
        """With what a dump has written in place of what was there; None leaves a part as it is."""
        return replace(
            self,
            step=self.step if step is None else step,
            dense=dense or self.dense,
            embeddings=embeddings or self.embeddings,
            # At another step an older position would be wrong.
            trained=self.trained if step is None else trained,
            created_by=f"persia {__version__}",
        )

    def require_embeddings(self, directory: Location) -> EmbeddingSection:
        """The rows of the checkpoint in `directory`; NotFoundError: it has none."""
        if self.embeddings is None:
            raise NotFoundError(f"{directory} has no embeddings: only its dense part was dumped")
        return self.embeddings

    def encode(self, signer: Signer | None = None) -> bytes:
        return encode_document(_FORMAT, to_json(self), signer)

    @classmethod
    def decode(cls, content: bytes, what: str) -> Manifest:
        """Raises CorruptionError, naming `what`, for anything but a manifest of a known version."""
        values = decode_document(content, what, form=_FORMAT)
        # Version 1 has no checksum: without these checks a damaged key would become its default.
        require_keys(values, ("created_by",), what)
        if isinstance(rows := values.get("embeddings"), Mapping):
            require_keys(rows, ("num_virtual_shards", "servers", "files"), f"{what}: embeddings")
        return read_document(cls, values, what)

    @classmethod
    def read(cls, directory: Location, keys: TrustedKeys | None = None) -> tuple[Manifest, str]:
        """The manifest of a checkpoint and its digest; NotFoundError: there is none.

        UntrustedError: it is not signed by one of `keys`, or of PERSIA_VERIFY_KEY if none are given.
        """
        path = directory / MANIFEST_NAME
        try:
            content = path.read_replaced(max_bytes=MAX_MANIFEST_BYTES)
        except NotFoundError as failure:
            raise NotFoundError(
                f"{directory} is no checkpoint: it has no {MANIFEST_NAME}. Check the path; an unfinished "
                "dump leaves none"
            ) from failure
        # Before it is parsed: nothing of what a stranger has written is acted on.
        keys = keys or trusted_keys()
        verify_document(content, str(path), keys)
        manifest = cls.decode(content, str(path))
        if keys is not None and manifest.embeddings is not None:
            manifest.embeddings.require_pages(str(path))
        # Servers compare the digest, so that all of them load the checkpoint that the coordinator means.
        return manifest, hashlib.sha256(content).hexdigest()


def check_file_name(name: str) -> None:
    """For names that scripts give to dense files."""
    if not re.fullmatch(_FILE_NAME, name) or name == MANIFEST_NAME or is_dump_id(name):
        raise InvalidArgumentError(
            f"{name!r} is not usable as the name of a checkpoint's file: use letters, digits, '.', '_', '-'"
        )
