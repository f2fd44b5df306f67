"""A packet: the manifest of what changed on all servers of a training job between two snapshot points.

Packets of a stream are numbered without gaps. Packet N turns the rows of packet N - 1, or newer ones, into
those of its own snapshot point. Where changes were lost, a *restart* takes a number instead, and names the
rows that later packets apply to; every stream begins with one. Layout: docs/incremental_updates.md, "Format".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pydantic import StrictBool, model_validator

from persia._version import __version__
from persia.errors import CorruptionError
from persia.storage.checksummed_json import decode_document, encode_document
from persia.storage.manifest import DumpId, FileEntry, FileName, RowSet
from persia.storage.position import Position, is_packet_folder
from persia.storage.signature import Signature
from persia.storage.signing import Signer
from persia.validation import Count, Number, read_document, require_keys, to_json

_FORMAT = "persia packet"
# Without these a damaged packet would pass for one that changes nothing.
_REQUIRED = ("created_by", "dense", "files", "is_from_nothing", "num_virtual_shards", "servers")


class BaseKind(Enum):
    """The rows that the packets after a restart apply to."""

    NOTHING = "nothing"  # none: drop all
    CHECKPOINT = "checkpoint"  # those of the checkpoint `dump_id`, which the trainer has loaded
    POSITION = "position"  # those of a checkpoint whose position is the restart's own or a later one


@dataclass(frozen=True, kw_only=True)
class Base:
    """The content of a restart. A checkpoint of its position or a later one is always good, too."""

    kind: BaseKind
    reason: str  # for people: why the packets before it are not followed
    dump_id: DumpId | None = None  # of CHECKPOINT: its `manifest.embeddings.dump_id`
    # Where the rows at the beginning of a stream come from: the checkpoint that the trainer has loaded (its
    # dump id), and the stream whose changes are in them. Empty: from nothing, or an older version wrote it.
    origin: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Base:
        if (self.kind is BaseKind.CHECKPOINT) != (self.dump_id is not None):
            raise CorruptionError(f"a base of kind {self.kind.value!r} has dump_id {self.dump_id!r:.80}")
        return self


@dataclass(frozen=True, kw_only=True)
class CheckpointReference:
    """The newest whole checkpoint that the trainer has dumped since the stream began."""

    url: str  # as the trainer calls it
    dump_id: str
    number: Count  # its position in this stream


@dataclass(frozen=True, kw_only=True)
class Packet(RowSet):
    """A manifest. `base` makes it a restart, which has no rows and may have dense files.

    `num_rows` counts rows that changed and rows that were removed. `files` are below `packets/`.
    """

    is_from_nothing: StrictBool = False  # all rows were cleared after the packet before: drop them first

    position: Position
    changed_after: Number  # seconds since 1970 by the trainer's clock: no change in it was made before
    cut_at: Number  # all changes in it were made before; of a restart, when it was written
    step: Count | None = None  # of the training loop
    base: Base | None = None
    dense: Mapping[FileName, FileEntry] = field(default_factory=dict)  # as in a checkpoint: dense.pt
    dense_step: Count | None = None  # the step of the dense files
    signature: Signature | None = None  # of the dense model's inputs
    checkpoint: CheckpointReference | None = None
    created_by: str = f"persia {__version__}"

    @property
    def is_restart(self) -> bool:
        return self.base is not None

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(file.num_bytes for file in self.dense.values())

    def encode(self, signer: Signer | None = None) -> bytes:
        # `stream` and `number` at the top level, where people and tools look for them.
        values = to_json(self)
        return encode_document(_FORMAT, {**values.pop("position"), **values}, signer)

    @classmethod
    def decode(cls, content: bytes, what: str) -> Packet:
        """Raises CorruptionError, naming `what`, for anything but a packet of a known version."""
        values = decode_document(content, what, form=_FORMAT)
        require_keys(values, _REQUIRED, what)
        return read_document(cls, {**values, "position": values}, what)

    @model_validator(mode="after")
    def _check(self) -> Packet:
        # A follower applies whatever passes here, so contradictions are refused that no trainer writes.
        if self.position.number == 0:
            raise CorruptionError("number is 0, packets count from 1")
        if self.position.number == 1 and not self.is_restart:
            raise CorruptionError("a stream's first packet must say what it follows")
        if self.is_restart and (self.files or self.is_from_nothing):
            raise CorruptionError("it says what packets follow, and has rows itself")
        if self.files and self.train_config is None:
            raise CorruptionError("it has rows, and no train_config")
        num_rows = sum(file.num_rows for file in self.files)
        if num_rows != self.num_rows:
            raise CorruptionError(f"its files have {num_rows} rows, its servers sent others")
        for file in (*self.files, *self.dense.values()):
            folder, _, _ = file.path.partition("/")
            if not is_packet_folder(folder) or Position.parse(folder) != self.position:
                raise CorruptionError(f"{file.path!r:.120} is no file of packet {self.position}")
        return self
