"""The record of the checkpoint of the job that a server's tier holds, and whether that is committed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, StrictBool

from persia._version import __version__
from persia.checkpoint.protocol import IN_PLACE_NAME
from persia.errors import CorruptionError, NotFoundError, StorageError
from persia.storage.checksummed_json import decode_document, encode_document
from persia.storage.location import Location
from persia.storage.manifest import Manifest
from persia.storage.schema import RowSchema
from persia.storage.versions import is_latest
from persia.validation import Count, complaint, read_document, to_json

_FORMAT = "pool of a persia server"
_PREPARED_KEYS = ("batch", "num_rows", "pool_id", "sequence")


def _check_prepared(prepared: Mapping[str, int]) -> Mapping[str, int]:
    if missing := [key for key in _PREPARED_KEYS if key not in prepared]:
        raise complaint(f"must have {', '.join(missing)}")
    return prepared


@dataclass(frozen=True, kw_only=True)
class TierCheckpoint:
    """A checkpoint of the job, in this server's tier."""

    operation: str  # the dump that made it; the manifest's name for the rows
    directory: str  # of the manifest
    step: Count | None = None  # of the training loop
    # By the tier file: the number of the checkpoint ("batch"), its rows.
    prepared: Annotated[Mapping[str, Count], AfterValidator(_check_prepared)]
    needs_latest: StrictBool = False  # it is committed once `latest`, beside its directory, names that, too

    @property
    def number(self) -> int:
        return self.prepared["batch"]

    @property
    def num_rows(self) -> int:
        return self.prepared["num_rows"]

    def __str__(self) -> str:
        step = "unknown" if self.step is None else self.step
        return f"{self.operation} (step {step}) of {self.directory}"

    def decide(self) -> bool:
        """Whether it is committed. If not, it never will be: this removes the marker, without which its
        coordinator cannot commit it. StorageError: the manifest or the marker cannot be accessed.
        """
        if self._is_named():
            return True
        # The commit is a rename of the marker (on a local disk): of removal and rename only one succeeds.
        (Location.of(self.directory) / self.operation / IN_PLACE_NAME).remove()
        # Again: the coordinator may have committed between the first look and the removal.
        return self._is_named()

    def _is_named(self) -> bool:
        """Whether its manifest names it, and `latest` the manifest where needed."""
        place = Location.of(self.directory)
        try:
            section = Manifest.read(place)[0].embeddings
        except NotFoundError as failure:
            # A missing mount must not look like a missing manifest: the rows would go back too far.
            if place.is_local and not os.path.isdir(place.path):
                raise StorageError(
                    f"{place} is no directory of this machine, and tells whether {self.operation} is "
                    "committed: mount it; an empty directory of that name tells that it is not"
                ) from failure
            return False
        except CorruptionError:
            return False  # it cannot be loaded
        if section is None or not section.in_place or section.dump_id != self.operation:
            return False
        return is_latest(place) or not self.needs_latest


@dataclass(frozen=True, kw_only=True)
class TierState:
    """The content of the file beside the tier file."""

    index: Count
    replicas: Count
    schema: RowSchema | None = None  # None: the server was never started with an embedding config
    committed: TierCheckpoint | None = None
    prepared: TierCheckpoint | None = None  # this server does not know yet whether it is committed
    created_by: str = f"persia {__version__}"

    def encode(self) -> bytes:
        return encode_document(_FORMAT, to_json(self))

    @classmethod
    def decode(cls, content: bytes, what: str) -> TierState:
        return read_document(cls, decode_document(content, what, form=_FORMAT), what)
