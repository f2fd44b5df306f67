"""The command group of `persia-launcher`.

Subcommands are imported when they are asked for, and import what they run only then, so that --help is
instant.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from persia import env
from persia.errors import PersiaError

# In the order in which a newcomer needs them.
_SUBCOMMANDS = {
    "init": "init.command",
    "preprocess": "preprocess.command",
    "local": "local.command",
    "slurm": "slurm.command",
    "plan": "plan.command",
    "nats-server": "nats_server.command",
    "embedding-parameter-server": "embedding_servers.embedding_parameter_server",
    "embedding-worker": "embedding_servers.embedding_worker",
    "data-loader": "data_loader.command",
    "nn-worker": "nn_worker.command",
    "status": "status.command",
    "resize": "resize.command",
    "doctor": "doctor.command",
    "trace": "trace.command",
    "checkpoint": "checkpoint.command",
    "signing-key": "signing_key.command",
    "secret": "secret.command",
    "certificates": "certificates.command",
    "serve": "serve.command",
    "evaluate": "evaluate.command",
    "torchserve-archive": "torchserve_archive.command",
    "export": "export.command",
}


class _Launcher(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # click turns None into "No such command".
        if cmd_name not in _SUBCOMMANDS:
            return None
        module, _, name = _SUBCOMMANDS[cmd_name].partition(".")
        command = getattr(importlib.import_module(f"persia.launcher.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PersiaError as error:
            # One line for users; the traceback is for those who look for it.
            if env.get_log_level() == "debug":
                raise
            click.secho(f"persia-launcher: {error}", fg="red", err=True)
            sys.exit(1)


@click.group(cls=_Launcher, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Start the processes of a persia job.

    \b
    A job to start from, for your own Parquet file:
      persia-launcher init my_job --parquet clicks.parquet

    \b
    What a job will need, before it runs:
      persia-launcher plan --feature-spec data/ --hosts hosts.yaml

    \b
    A whole job on this machine, in one command:
      persia-launcher local --data-loader data_loader.py --nn-worker train.py \\
          --embedding-config embedding_config.yml --global-config global_config.yml

    \b
    Or each process by itself, on one machine or on many, in any order. All need PERSIA_NATS_URL:
      persia-launcher nats-server
      persia-launcher embedding-parameter-server --embedding-config ... --global-config ...
      persia-launcher embedding-worker --embedding-config ... --global-config ...
      persia-launcher data-loader data_loader.py
      persia-launcher nn-worker train.py

    \b
    And look at a job that runs:
      persia-launcher status       # rates, queues, staleness, memory; --once, --json
      persia-launcher trace        # the phases of some batches; --summary, or for ui.perfetto.dev
      persia-launcher resize --parameter-servers 3    # while it trains
      persia-launcher doctor       # what is wrong with this machine or the settings

    \b
    And use what it has trained:
      persia-launcher serve model/ --embedding-config ...    # predictions over gRPC

    Jobs that share a NATS server need different names: PERSIA_JOB_NAME.
    """
