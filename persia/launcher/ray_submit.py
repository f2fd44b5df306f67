"""`persia-launcher ray submit`: runs a whole job on a Ray cluster, and judges how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from persia.errors import UnavailableError
from persia.launcher import options
from persia.launcher.job_description import ROLES, JobDescription, description_options
from persia.launcher.nats_server import NATS
from persia.launcher.options import COUNT, Group, option
from persia.launcher.process_specs import OF_ONE_PROCESS, ProcessSpecs
from persia.launcher.supervision import JobProcesses, max_restarts, run_job
from persia.launcher.supervisor import OutputSink, ProcessSpec, SupervisedProcess
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER
from persia.optional import needs

if TYPE_CHECKING:
    from persia.launcher.ray_places import PlacedProcesses

# The Python before it is that of the node.
_LAUNCHER = ("-m", "persia.launcher")
_ROLE_OF = dict(
    zip((EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, "data-loader", NN_WORKER), ROLES, strict=True)
)
_Needs = Mapping[str, Mapping[str, float]]
# Of the host where the command runs, not of the job.
_OF_THIS_HOST = {
    *OF_ONE_PROCESS,
    "PERSIA_ADVERTISE_HOST",
    "PERSIA_BIND_HOST",
    "PERSIA_JOB_SECRET_FILE",
    "PERSIA_SOCKET_IFNAME",
}


@dataclass(frozen=True, kw_only=True)
class RayJob(JobDescription):
    """What `persia-launcher ray submit` was asked for."""

    nodes: int
    resources: _Needs
    variables: Mapping[str, str]
    max_restarts: int

    def need_of(self, name: str) -> Mapping[str, float]:
        """Resources of the process."""
        role = next(role for start, role in _ROLE_OF.items() if name.startswith(start))
        return self.resources.get(role, {"CPU": self.nproc_per_node if role == "ranks" else 1})


def _amounts(_ctx: click.Context, _param: click.Parameter, given: Any) -> _Needs:
    needs: dict[str, dict[str, float]] = {}
    for role, text in given:
        if role in needs:
            raise click.BadParameter(f"{role} are there twice, the second time with {text!r}")
        try:
            amounts = {name: float(amount) for name, amount in (word.split("=") for word in text.split())}
            if "" in amounts:  # it would abort this process
                raise ValueError
        except ValueError:
            raise click.BadParameter(f"{text!r} is not like 'CPU=8 GPU=1 memory=64e9'") from None
        for name, amount in amounts.items():
            if amount < 0 or not (amount < 1 or amount.is_integer()):
                raise click.BadParameter(
                    f"{role}: {name}={amount:g} must be a positive whole number, or less than 1"
                )
        needs[role] = {name: amount for name, amount in amounts.items() if amount}
        if not needs[role]:
            raise click.BadParameter(f"{role} must need something")
    return needs


def _variables(_ctx: click.Context, _param: click.Parameter, given: Any) -> Mapping[str, str]:
    for text in given:
        if not text.partition("=")[0] or "=" not in text:
            raise click.BadParameter(f"{text!r} is not like NAME=VALUE")
    return dict(text.split("=", 1) for text in given)


@click.group("ray", cls=Group)
def command() -> None:
    """Run jobs on a Ray cluster."""


@command.command()
@description_options
@option("--nodes", type=COUNT, default=1, help="Groups of ranks, each of --nproc-per-node on one machine.")
@option(
    "--address",
    default="auto",
    help="Of the cluster: HOST:PORT, ray://HOST:PORT, or auto for the one that this machine belongs to.",
)
@option(
    "--resources",
    multiple=True,
    type=(click.Choice(ROLES), str),
    metavar="ROLE TEXT",
    callback=_amounts,
    help="What a process of a role needs, of ranks a group: parameter-servers 'CPU=16 memory=64e9', or ranks "
    "'CPU=16 GPU=8'. Memory is in bytes; other names are the cluster's own. Default: CPU=1, of ranks 1 each.",
)
@option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_variables,
    help="A variable of the job's processes; once for each. They also get this command's PERSIA_* ones, "
    "but for its addresses.",
)
@option(
    "--copy-folder",
    is_flag=True,
    help="Copy the working directory to the nodes, but for what .gitignore names. Else they must share it.",
)
@max_restarts
@options.sign_key
@options.verify_key
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def submit(address: str, copy_folder: bool, **given: Any) -> None:
    """Run a whole job on a Ray cluster: each process in an actor, all in one placement group.

    \b
      persia-launcher ray submit --nn-worker train.py --data-loader data_loader.py \\
          --embedding-config embedding_config.yml --parameter-servers 2 -- --epochs 3

    Ends when the training script has ended, with its exit code. When any process fails more often than
    --max-restarts allows, on Ctrl-C, or when this command dies, all of them are stopped. The nodes need
    persia. SCRIPT_ARGS, best after --, go to the training script.
    """
    job = RayJob(**given)
    job.check()
    _connect(address, copy_folder)
    sys.exit(run_job(lambda stack, sink: _start(job, stack, sink), job.max_restarts))


def _connect(address: str, copy_folder: bool) -> None:
    with needs("this needs ray", "'persia[ray]'"):
        import ray
    environment = {"working_dir": os.getcwd()} if copy_folder else None
    try:
        ray.init(address, runtime_env=environment, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UnavailableError(
            f"there is no Ray cluster at {address} ({error}): `ray start --head` makes one of this machine"
        ) from error


def _start(job: RayJob, stack: contextlib.ExitStack, sink: OutputSink) -> tuple[PlacedProcesses, _Processes]:
    """Reserves places for all processes. When the stack ends, so do they, and the places after them."""
    import ray

    from persia.launcher.ray_places import PlacedProcesses, reserve

    stack.callback(ray.shutdown)
    names = [spec.name for spec in _specs(job, {}, "", 0)]
    # Standbys are of use on other nodes than their servers.
    places = reserve({name: job.need_of(name) for name in names}, "SPREAD" if job.has_standbys else "PACK")
    placed = stack.enter_context(PlacedProcesses(sink, places))
    return placed, _Processes(job, placed)


class _Processes(JobProcesses):
    """What a job consists of."""

    def __init__(self, job: RayJob, placed: PlacedProcesses) -> None:
        self._job, self._placed = job, placed
        self._nats_url = ""

    def specs(self) -> list[ProcessSpec]:
        master = self._placed.free_address(_groups(self._job)[0])  # which may take long
        broker = [] if self._placed.is_running(NATS) else [self._broker()]
        return broker + _specs(self._job, self._env(), *master)

    def _broker(self) -> ProcessSpec:
        # Where Ray has put it, which may be elsewhere than before.
        host, port = self._placed.free_address(NATS)
        self._nats_url = f"nats://{host}:{port}"
        watched_as = f"PERSIA_NATS_URL={self._nats_url} PERSIA_JOB_NAME={self._job.job_name}"
        click.secho(f"watch it: {watched_as} persia-launcher status", err=True)
        command = (*_LAUNCHER, "nats-server", f"--host={host}", f"--port={port}")
        return ProcessSpec(name=NATS, command=command, env=self._env(), stop_stage=2)

    def _env(self) -> dict[str, str]:
        """Added to the environment of the nodes."""
        from persia.security import secret  # not for --help

        own = {name: text for name, text in os.environ.items() if name.startswith("PERSIA_")}
        return {
            **{name: text for name, text in own.items() if name not in _OF_THIS_HOST},
            **self._job.variables,
            "PERSIA_NATS_URL": self._nats_url,
            "PERSIA_JOB_NAME": self._job.job_name,
            "PERSIA_JOB_SECRET": secret.find().text,
            "PERSIA_EMBEDDING_CONFIG": self._job.embedding_config,
            "PYTHONUNBUFFERED": "1",
        }

    def is_bound_to(self, ended: SupervisedProcess) -> bool:
        # The others know the broker's address, which is another one in another place.
        return ended.name == NATS and self._placed.has_lost_place(ended)


def _specs(job: RayJob, env: Mapping[str, str], host: str, port: int) -> list[ProcessSpec]:
    """All processes but the broker; ranks of several groups meet at `host` and `port`."""
    specs = ProcessSpecs(
        env=env,
        embedding_config=job.embedding_config,
        global_config=job.global_config,
        launcher=_LAUNCHER,
    )
    servers = range(job.parameter_servers)
    made = [specs.server(EMBEDDING_PARAMETER_SERVER, index, job.parameter_servers) for index in servers]
    made += job.helpers(specs)
    for index, name in enumerate(_groups(job)):
        machines = (
            f"--nnodes={job.nodes}",
            f"--node-rank={index}",
            f"--master-addr={host}",
            f"--master-port={port}",
        )
        ranks = specs.nn_worker(
            job.nn_worker, job.script_args, job.nproc_per_node, {}, machines if job.nodes > 1 else ()
        )
        made.append(replace(ranks, name=name))
    return made


def _groups(job: RayJob) -> list[str]:
    """Names of the groups of ranks."""
    return [NN_WORKER] if job.nodes == 1 else [f"{NN_WORKER}-{index}" for index in range(job.nodes)]
