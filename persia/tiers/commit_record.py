"""Which checkpoint of the job a server's tier holds: what is known of it, and whether it counts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persia._version import __version__
from persia.checkpoint.protocol import IN_PLACE_NAME
from persia.errors import CorruptionError, NotFoundError, StorageError
from persia.messaging.payloads import json_int
from persia.storage.checksummed_json import decode_document, encode_document
from persia.storage.fields import as_object, text_at
from persia.storage.location import Location
from persia.storage.manifest import Manifest
from persia.storage.schema import RowSchema
from persia.storage.versions import is_latest

__all__ = ["PoolCheckpoint", "TierState"]

_FORMAT = "pool of a persia server"
_PREPARED_KEYS = ("batch", "num_rows", "pool_id", "sequence")


@dataclass(frozen=True, kw_only=True)
class PoolCheckpoint:
    """A checkpoint of the job, in this server's pool."""

    operation: str  # the dump that made it; the manifest's name for the rows
    directory: str  # of the manifest
    step: int | None  # of the training loop
    prepared: Mapping[str, int]  # of the pool: its number ("batch"), its rows
    needs_latest: bool = False  # its manifest counts once `latest`, beside its directory, names that

    @property
    def number(self) -> int:
        return self.prepared["batch"]

    @property
    def num_rows(self) -> int:
        return self.prepared["num_rows"]

    def decide(self) -> bool:
        """Whether it counts. If not, it never will: without the file that the last step is made of, its
        coordinator cannot take that any more. StorageError: what tells cannot be read, or that file not be
        removed.
        """
        if self._is_named():
            return True
        (Location.of(self.directory) / self.operation / IN_PLACE_NAME).remove()
        return self._is_named()  # by a coordinator that was faster

    def _is_named(self) -> bool:
        """By its manifest, and that by `latest` where it has to be."""
        place = Location.of(self.directory)
        try:
            section = Manifest.read(place)[0].embeddings
        except NotFoundError as failure:
            if place.is_local and not os.path.isdir(place.path):
                raise StorageError(
                    f"{place} is no directory of this machine, and says whether {self.operation} counts: "
                    "mount it; an empty directory of that name says that it does not"
                ) from failure
            return False
        except CorruptionError:
            return False  # nobody can load it
        if section is None or not section.in_place or section.dump_id != self.operation:
            return False
        return is_latest(place) or not self.needs_latest

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "prepared": dict(self.prepared)}

    @classmethod
    def from_json(cls, values: object, what: str) -> PoolCheckpoint | None:
        if values is None:
            return None
        values = as_object(values, what)
        prepared = as_object(values.get("prepared"), f"{what}: prepared")
        return cls(
            operation=text_at(values, "operation", what),
            directory=text_at(values, "directory", what),
            step=None if values.get("step") is None else json_int(values, "step", what),
            prepared={key: json_int(prepared, key, what) for key in _PREPARED_KEYS},
            needs_latest=values.get("needs_latest") is True,
        )


@dataclass(frozen=True, kw_only=True)
class TierState:
    """What stands in the file beside the pool."""

    index: int
    replicas: int
    schema: RowSchema | None  # None: the server was never started with an embedding config
    committed: PoolCheckpoint | None = None
    prepared: PoolCheckpoint | None = None  # of which this server does not know whether it counts

    def encode(self) -> bytes:
        values = {
            "created_by": f"persia {__version__}",
            "index": self.index,
            "replicas": self.replicas,
            "schema": None if self.schema is None else self.schema.to_json(),
            "committed": None if self.committed is None else self.committed.to_json(),
            "prepared": None if self.prepared is None else self.prepared.to_json(),
        }
        return encode_document(_FORMAT, values)

    @classmethod
    def decode(cls, content: bytes, what: str) -> TierState:
        values = decode_document(content, what, form=_FORMAT)
        schema = values.get("schema")
        return cls(
            index=json_int(values, "index", what),
            replicas=json_int(values, "replicas", what),
            schema=None if schema is None else RowSchema.from_json(schema, what),
            committed=PoolCheckpoint.from_json(values.get("committed"), what),
            prepared=PoolCheckpoint.from_json(values.get("prepared"), what),
        )
