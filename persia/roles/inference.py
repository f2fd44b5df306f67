"""Servers of an inference job (`job_type: Infer`) hold a checkpoint's rows, looked up and never changed.

Parameter servers load their shares when they start, and refuse everything until they have done so; packets of
the training bring the rows forward. Embedding workers find the servers by `infer_config.servers`. Neither
needs a broker, and `InferCtx` asks the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from persia.checkpoint.checkpoints import Source
from persia.checkpoint.protocol import Request, State, Verb
from persia.checkpoint.server_job import LoadJob, ServerShare
from persia.config import GlobalConfig, InferConfig
from persia.errors import ConfigError, FailedPreconditionError
from persia.packets.applier import PacketApplier, clear_rows, replace_rows
from persia.packets.follower import FollowOptions
from persia.packets.log import PacketLog
from persia.packets.packet import Packet
from persia.roles.lifetime import ServerOptions
from persia.storage.location import Location
from persia.storage.manifest import Manifest
from persia.storage.position import Position

if TYPE_CHECKING:
    from persia._native import ParameterServer

JOB_TYPE = "Infer"

_LEASE_S = 3600.0  # of a load that is watched from its own process
_POLL_S = 0.05


def config_of(options: ServerOptions, config: GlobalConfig) -> GlobalConfig:
    """`config` with what the command line says of an inference job, which makes it one."""
    if options.checkpoint is None and not options.parameter_servers:
        return config
    given = infer_config(config)
    # Options win over the config: one file may serve all servers of a job.
    infer = given.replace(
        embedding_checkpoint=options.checkpoint or given.embedding_checkpoint,
        servers=list(options.parameter_servers) or given.servers,
    )
    common = config.common_config.replace(job_type=JOB_TYPE, infer_config=infer)
    return config.replace(common_config=common)


def inference_servers(config: GlobalConfig) -> list[str]:
    """ "host:port" of the parameter servers, by replica index. ConfigError: none are given."""
    servers = infer_config(config).servers
    if not servers:
        raise ConfigError(
            "common_config.infer_config.servers is missing: an embedding worker with job_type='Infer' needs "
            "the host:port of each parameter server, in the order of their replica indices (or as "
            "--parameter-server)"
        )
    return servers


def infer_config(config: GlobalConfig) -> InferConfig:
    return config.common_config.infer_config or InferConfig()


def follow_options(config: GlobalConfig) -> FollowOptions | None:
    """Returns None for servers that follow no packets. ConfigError: they have no checkpoint either."""
    section, infer = config.embedding_parameter_server_config, infer_config(config)
    if not section.enable_incremental_update:
        # A server without rows would answer every lookup with zeros, which looks like a bad model.
        if infer.embedding_checkpoint is None:
            raise ConfigError(
                "common_config.infer_config.embedding_checkpoint is missing: a parameter server with "
                "job_type='Infer' needs it, or --checkpoint"
            )
        return None
    return FollowOptions(
        packets=Location.of(section.incremental_dir),
        checkpoints=None if infer.embedding_checkpoint is None else Location.of(infer.embedding_checkpoint),
        poll_s=infer.incremental_poll_ms / 1000,
        max_behind=infer.incremental_max_behind,
    )


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
