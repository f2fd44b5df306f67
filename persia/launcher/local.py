"""`persia-launcher local`: runs a whole job on this machine and judges how it ended."""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from persia.launcher import options
from persia.launcher.job_description import JobDescription, description_options
from persia.launcher.nats_server import start_local_nats
from persia.launcher.options import option
from persia.launcher.process_specs import ProcessSpecs, job_environment
from persia.launcher.supervision import JobProcesses, max_restarts, run_job, tell
from persia.launcher.supervisor import OutputSink, ProcessSpec, Supervisor

if TYPE_CHECKING:
    from persia.launcher.resizing import Resizer


@dataclass(frozen=True, kw_only=True)
class LocalJob(JobDescription):
    """What `persia-launcher local` was asked for."""

    nats_url: str | None
    max_restarts: int = 0


@click.command("local")
@description_options
@options.sign_key
@options.verify_key
@option(
    "--nats-url",
    metavar="URL",
    help="Use this NATS server instead of starting one. PERSIA_NATS_URL is not read: a job of its own needs "
    "no server that others use. A job without --job-name gets a name of its own there.",
)
@max_restarts
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def command(**given: Any) -> None:
    """Run a whole job on this machine: NATS, servers, data loaders and training, on free ports.

    \b
      persia-launcher local --nn-worker train.py --data-loader data_loader.py \\
          --embedding-config embedding_config.yml --parameter-servers 2 -- --epochs 3

    Ends when the training script has ended, with its exit code. When any process fails more often than
    --max-restarts allows, or on Ctrl-C, all of them are stopped. SCRIPT_ARGS, best after --, go to the
    training script.
    """
    source = click.get_current_context().get_parameter_source("job_name")
    if given["nats_url"] and source is ParameterSource.DEFAULT:
        # Another job without a name may use the server.
        given["job_name"] = f"local-{secrets.token_hex(4)}"
    job = LocalJob(**given)
    # Before the handlers of signals: an error here is a plain exit, with nothing to stop.
    job.check()
    sys.exit(run_job(lambda stack, sink: _start(job, stack, sink), job.max_restarts))


@dataclass(frozen=True)
class _Processes(JobProcesses):
    """What a job consists of, but for NATS."""

    servers: Resizer  # its parameter servers, whose number may change
    others: list[ProcessSpec]

    def specs(self) -> list[ProcessSpec]:
        return [*self.servers.specs(), *self.others]

    def is_expendable(self, name: str) -> bool:
        return self.servers.is_expendable(name)

    def cancel(self) -> None:
        self.servers.cancel()


def _start(job: LocalJob, stack: contextlib.ExitStack, sink: OutputSink) -> tuple[Supervisor, _Processes]:
    """Starts NATS, and makes ready what else the job consists of."""
    from persia.launcher.resizing import Resizer, ResizeService  # not for --help
    from persia.messaging.session import NatsSession

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="persia-"))
    supervisor = stack.enter_context(Supervisor(sink))
    nats_url = job.nats_url or start_local_nats(supervisor, Path(folder))
    watched_as = f"PERSIA_NATS_URL={nats_url} PERSIA_JOB_NAME={job.job_name}"
    click.secho(f"watch it: {watched_as} persia-launcher status", err=True)
    # Scripts that need the slots, too, find them there.
    extra = {"PERSIA_EMBEDDING_CONFIG": str(Path(job.embedding_config).resolve())}
    env = job_environment(nats_url=nats_url, job_name=job.job_name, extra=extra)
    specs = ProcessSpecs(env=env, global_config=job.global_config, embedding_config=job.embedding_config)
    ranks = specs.nn_worker(job.nn_worker, job.script_args, job.nproc_per_node, {})
    session = stack.enter_context(NatsSession(nats_url, job.job_name, name="launcher"))
    servers = Resizer(supervisor, session, specs, job.parameter_servers)
    stack.callback(ResizeService(servers, session, tell).close)
    return supervisor, _Processes(servers, [*job.helpers(specs), ranks])
