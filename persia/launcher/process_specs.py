"""The processes of a job on one machine, as specs for the supervisor. Pure: nothing is started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from persia.launcher.supervisor import ProcessSpec
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, NN_WORKER

# Set for one process of a job; inherited by the whole job they would make every process the same rank.
OF_ONE_PROCESS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "REPLICA_INDEX",
    "REPLICA_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PERSIA_METRICS_PORT",
    "PERSIA_HEALTH_PORT",
    "PERSIA_RESTARTS",
)


def job_environment(*, nats_url: str, job_name: str, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job's processes: this one's, without what belongs to a single process."""
    # The launcher itself may be a replica or a rank of another job.
    inherited = {name: value for name, value in os.environ.items() if name not in OF_ONE_PROCESS}
    # Output is read through pipes: unbuffered, it appears when it is written.
    own = {"PERSIA_NATS_URL": nats_url, "PERSIA_JOB_NAME": job_name, "PYTHONUNBUFFERED": "1"}
    return {**inherited, **own, **extra}


STANDBY = "-standby"  # ends the name of the process


@dataclass(frozen=True, kw_only=True)
class ProcessSpecs:
    """Builds the specs of one job's processes."""

    env: Mapping[str, str]
    embedding_config: str
    global_config: str | None = None  # None: the defaults
    launcher: Sequence[str] = field(default=(sys.executable, "-m", "persia.launcher"))

    def server(self, role: str, index: int | str, replicas: int, *, standby: bool = False) -> ProcessSpec:
        """A parameter server or an embedding worker. Workers stop first: they return gradients to servers.

        `index` may be a word that the caller replaces, if one spec is for all replicas. `standby`: the
        standby of a parameter server, named "embedding-parameter-server-0-standby".
        """
        command = (
            *self.launcher,
            role,
            "--port=0",  # told by discovery
            f"--replica-index={index}",
            f"--replica-size={replicas}",
            f"--embedding-config={self.embedding_config}",
            *(("--standby",) if standby else ()),
            *(() if self.global_config is None else (f"--global-config={self.global_config}",)),
        )
        stop_stage = 1 if role == EMBEDDING_PARAMETER_SERVER else 0
        name = f"{role}-{index}{STANDBY if standby else ''}"
        return ProcessSpec(name=name, command=command, env=self.env, stop_stage=stop_stage)

    def data_loader(
        self,
        script: str,
        arguments: Sequence[str],
        index: int | str,
        replicas: int,
        env: Mapping[str, str],
    ) -> ProcessSpec:
        """`env` is added to the job's; `index` as in `server`."""
        options = ("--replica-index", str(index), "--replica-size", str(replicas))
        command = (*self.launcher, "data-loader", *options, script, *arguments)
        return ProcessSpec(name=f"data-loader-{index}", command=command, env={**self._script_env, **env})

    def nn_worker(
        self,
        script: str,
        arguments: Sequence[str],
        nproc_per_node: int,
        env: Mapping[str, str],
        machines: Sequence[str] = (),
    ) -> ProcessSpec:
        """All ranks of a machine, one process of the supervisor. `env` is added to the job's.

        `machines`: the options that say which of several machines this is.
        """
        options = ("--nproc-per-node", str(nproc_per_node), *machines)
        command = (*self.launcher, "nn-worker", *options, script, *arguments)
        return ProcessSpec(name=NN_WORKER, command=command, env={**self._script_env, **env})

    @property
    def _script_env(self) -> dict[str, str]:
        """Scripts have no option for the global config; they take its metrics settings."""
        config = {} if self.global_config is None else {"PERSIA_GLOBAL_CONFIG": self.global_config}
        return {**self.env, **config}
