"""The rows of an inference job's parameter server: out of a checkpoint, and brought forward by packets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from persia.checkpoint.checkpoints import Source
from persia.checkpoint.protocol import Request, State, Verb
from persia.checkpoint.server_job import LoadJob, ServerShare
from persia.errors import FailedPreconditionError
from persia.packets.applier import PacketApplier, clear_rows, replace_rows
from persia.packets.log import PacketLog
from persia.packets.packet import Packet
from persia.storage.manifest import Manifest
from persia.storage.position import Position

if TYPE_CHECKING:
    from persia._native import ParameterServer

_LEASE_S = 3600.0  # of a load that is watched from its own process
_POLL_S = 0.05


@dataclass(frozen=True)
class RowCopy:
    """A server's rows at one packet."""

    server: ParameterServer
    rows: PacketApplier
    log: PacketLog

    def prepare(self, packet: Packet) -> Callable[[], None]:
        return self.rows.prepare(self.log.files, packet)


class RowCopies:
    """For a Follower. The first copy is loaded into the server itself, which does not answer yet; later ones
    into a server without clients, whose rows then replace those that answer, in one step.
    """

    def __init__(
        self, log: PacketLog, server: ParameterServer, share: ServerShare, make: Callable[[], ParameterServer]
    ) -> None:
        self._log, self._server, self._share, self._make = log, server, share, make
        self._is_in_use = False

    def load(self, checkpoint: Source | None) -> RowCopy:
        server = self._server
        if self._is_in_use:
            server = self._make()
            server.start("127.0.0.1", 0)  # it has no rows before; it refuses all clients
        share = replace(self._share, store=server.store)
        if checkpoint is None:
            clear_rows(server.store)
        else:
            load_share(share, str(checkpoint.location))
        return RowCopy(server, PacketApplier(share), self._log)

    def use(self, copy: RowCopy, position: Position | None) -> RowCopy:
        self._is_in_use = True
        # The first copy was loaded in place, as no client was answered before it.
        if copy.server is self._server:
            return copy
        replace_rows(self._server.store, copy.server.store)
        # Its rows have been moved; it has no clients to wait for.
        copy.server.stop(0.0)
        return RowCopy(self._server, PacketApplier(self._share), self._log)


def load_share(share: ServerShare, checkpoint: str) -> int:
    """Loads a server's rows, without the optimizer's state, after all were checked; how many there are."""
    place = Source(checkpoint).location
    manifest, digest = Manifest.read(place)
    section = manifest.require_embeddings(place)
    if section.train_config is None:
        raise FailedPreconditionError(
            f"{place} was dumped before the servers had an optimizer: it has no rows"
        )
    arguments = {
        "directory": str(place),
        "manifest": digest,
        "train_config": section.train_config,
        # Inference never updates rows; optimizer state would only take memory.
        "with_state": False,
    }
    job = LoadJob(Request(verb=Verb.LOAD, operation="load-at-start", arguments=arguments), share, _LEASE_S)
    job.start()
    while True:
        report = job.report()
        if report.error is not None:
            raise report.error
        # Applied only when all files are checked: a broken file must not leave half of the rows replaced.
        if report.state is State.CHECKED:
            job.apply()
        if report.state is State.DONE:
            return report.total_rows
        time.sleep(_POLL_S)
