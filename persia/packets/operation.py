"""One packet over all servers of a job, from the first request until the servers forget what is in it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import StrictBool

from persia.checkpoint.operation import Operation, check_visible
from persia.checkpoint.peers import Peer
from persia.checkpoint.protocol import State, Verb
from persia.errors import CorruptionError, FailedPreconditionError, PersiaError
from persia.logger import get_default_logger
from persia.packets.changes import IncrementalSettings
from persia.packets.log import PacketLog
from persia.packets.packet import CheckpointReference, Packet
from persia.storage.manifest import RowSet
from persia.storage.position import Position
from persia.storage.shard_file import write_files
from persia.storage.signature import Signature
from persia.storage.signing import signer
from persia.validation import Count, read_document


@dataclass(frozen=True, kw_only=True)
class ChangeStatus:
    """The changes of one server that are in no packet."""

    settings: IncrementalSettings | None = None  # None: it has no incremental updates
    stream: str | None = None  # whose its changes are
    is_from_start: StrictBool = False  # they are all rows of the store, and belong to no stream yet
    num_rows: Count = 0


@dataclass(frozen=True, kw_only=True)
class DenseState:
    """Files of the dense model, as they were after `step`."""

    files: Mapping[str, bytes]
    step: int
    signature: Signature | None = None


def ask_changes(peers: Sequence[Peer], deadline_s: float) -> list[ChangeStatus]:
    """Asks every server how much has changed."""
    # No operation on the server, which answers at once: the name only appears in errors.
    reports = Operation("changes", peers, deadline_s).ask_all(Verb.CHANGES)
    return [read_document(ChangeStatus, report.result, "changes report") for report in reports]


def begin_stream(peers: Sequence[Peer], stream: str, deadline_s: float, *, anew: bool) -> None:
    """Makes the changes of all servers those of `stream`; `anew`: from this moment on."""
    Operation("changes", peers, deadline_s).ask_all(Verb.TRACK, {"stream": stream, "anew": anew})


@dataclass
class PacketOperation(Operation):
    """Writes the changes of all servers as packet `position` of `log`. `operation` is its folder."""

    log: PacketLog = field(kw_only=True)
    position: Position = field(kw_only=True)
    changed_after: float = field(kw_only=True)
    is_committed: bool = field(default=False, init=False)  # every server knows that its changes are written

    def run(
        self, *, step: int | None, dense: DenseState | None, checkpoint: CheckpointReference | None
    ) -> Packet:
        """Returns what is written now. After an error there is no such packet, and all changes come with the
        next one; only where the storage leaves open what it did, the packet may be there."""
        self._require_shared(self.log.location, "incremental_dir=")
        try:
            arguments = {
                "directory": str(self.log.files),
                "stream": self.position.stream,
                "with_pages": signer() is not None,
            }
            self.ask_all(Verb.TAKE, arguments)
            # After all have answered: no change in the packet was made later than this.
            cut_at = time.time()
            dense_files = write_files(self.log.files, self.operation, dense.files) if dense else {}
            results = [report.result or {} for report in self._await("writing", State.CHECKED)]
            # Learning rates may change between two packets: any configuration will do for the rows.
            configs = [result["train_config"] for result in results if result.get("train_config")]
            values = {**self._rows(results), "train_config": configs[0] if configs else None}
            packet = Packet(
                **vars(read_document(RowSet, values, f"the report of {self.operation}")),
                is_from_nothing=self._is_from_nothing(results),
                position=self.position,
                changed_after=self.changed_after,
                cut_at=cut_at,
                step=step,
                dense=dense_files,
                dense_step=None if dense is None else dense.step,
                signature=None if dense is None else dense.signature,
                checkpoint=checkpoint,
            )
            # Before the manifest: a follower must never see a packet whose files it cannot read.
            check_visible(self.log.files, packet.files)
            self.log.add(packet)
        except BaseException:
            self.cancel()
            (self.log.files / self.operation).remove_quietly()
            raise
        self._commit()
        return packet

    def _is_from_nothing(self, results: Sequence[dict[str, Any]]) -> bool:
        """Whether all servers have cleared their rows since the packet before."""
        flags = {result.get("is_from_nothing") for result in results}
        if not flags <= {True, False}:
            raise CorruptionError(
                f"{self.operation}: a server's report does not say is_from_nothing: {flags}"
            )
        if len(flags) > 1:
            # One server has cleared its rows, another is about to. The next packet has the changes of both.
            raise FailedPreconditionError(f"packet {self.position} waits: rows are being cleared")
        return flags == {True}

    def _commit(self) -> None:
        """Lets servers forget the changes. One that misses it sends them again, which is harmless unless rows
        were cleared."""
        try:
            self.ask_all(Verb.APPLY)
            self._await("committing", State.DONE)
            self.is_committed = True
        except PersiaError as failure:
            get_default_logger().warning("packet %s is written, but: %s", self.position, failure)
