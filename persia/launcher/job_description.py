"""What a training job consists of: the options that `persia-launcher local`, `slurm` and `ray`
share.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from persia.launcher import options
from persia.launcher.options import COUNT, all_of, option
from persia.launcher.process_specs import ProcessSpecs
from persia.launcher.script import checked_script
from persia.launcher.supervisor import ProcessSpec
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER

ROLES = ("parameter-servers", "embedding-workers", "data-loaders", "ranks")  # with resources of their own


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """Scripts, settings and numbers of processes of one training job."""

    nn_worker: str
    data_loader: str | None  # None: the training script makes its batches itself
    embedding_config: str
    global_config: str | None
    parameter_servers: int
    embedding_workers: int
    data_loaders: int
    nproc_per_node: int
    script_args: tuple[str, ...]
    loader_args: tuple[str, ...]
    job_name: str

    def check(self) -> None:
        """Finds what the processes would stumble over, before any of them is started."""
        from persia.config import load_embedding_config, load_global_config  # not for --help

        if self.global_config is not None:
            load_global_config(self.global_config)
        load_embedding_config(self.embedding_config)
        checked_script(self.nn_worker)
        if self.data_loader is not None:
            checked_script(self.data_loader)

    @property
    def has_standbys(self) -> bool:
        """Whether each parameter server has a standby."""
        from persia.config import load_global_config

        if self.global_config is None:
            return False
        return load_global_config(self.global_config).embedding_parameter_server_config.standbys > 0

    def helpers(self, specs: ProcessSpecs) -> list[ProcessSpec]:
        """Its processes but the broker, the parameter servers and the ranks."""
        made = [
            specs.server(EMBEDDING_WORKER, index, self.embedding_workers)
            for index in range(self.embedding_workers)
        ]
        if self.has_standbys:
            role, replicas = EMBEDDING_PARAMETER_SERVER, self.parameter_servers
            made += [specs.server(role, index, replicas, standby=True) for index in range(replicas)]
        if self.data_loader is not None:
            for index in range(self.data_loaders):
                made.append(
                    specs.data_loader(self.data_loader, self.loader_args, index, self.data_loaders, {})
                )
        return made


# The fields of `JobDescription`; the argument `script_args` is each command's own.
description_options = all_of(
    option(
        "--nn-worker",
        required=True,
        variable="PERSIA_NN_WORKER_ENTRY",
        metavar="FILE",
        help="Training script.",
    ),
    option(
        "--data-loader",
        variable="PERSIA_DATALOADER_ENTRY",
        metavar="FILE",
        help="Data loading script; without it the training script makes its batches itself.",
    ),
    options.embedding_config(required=True),
    options.global_config,
    option(
        "--parameter-servers",
        type=COUNT,
        default=1,
        help="Embedding parameter servers, each holding a share of the rows.",
    ),
    option("--embedding-workers", type=COUNT, default=1, help="Processes that look up and pool embeddings."),
    option("--data-loaders", type=COUNT, default=1, help="Processes that run the data loading script."),
    option("--nproc-per-node", type=COUNT, default=1, help="Ranks of the training script on a machine."),
    option(
        "--loader-args",
        default="",
        metavar="TEXT",
        callback=lambda _ctx, _param, text: tuple(shlex.split(text)),
        help="Arguments of the data loading script, quoted as in a shell.",
    ),
    options.job_name,
)
