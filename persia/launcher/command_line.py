"""The command group of `persia-launcher`.

Subcommands are imported when they are asked for, and import what they run only then, so that --help is
instant.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from persia import __version__, env
from persia.errors import PersiaError
from persia.launcher import options

# In the order in which a newcomer needs them.
_SECTIONS = {
    "Begin": {"init": "init.command", "preprocess": "preprocess.command", "plan": "plan.command"},
    "Run a whole job": {"local": "local.command", "ray": "ray_submit.command", "slurm": "slurm.command"},
    "Run one process of a job": {
        "nats-server": "nats_server.command",
        "embedding-parameter-server": "embedding_servers.embedding_parameter_server",
        "embedding-worker": "embedding_servers.embedding_worker",
        "data-loader": "data_loader.command",
        "nn-worker": "nn_worker.command",
    },
    "Watch a job, and change it": {
        "status": "status.command",
        "trace": "trace.command",
        "resize": "resize.command",
        "doctor": "doctor.command",
    },
    "Use what it has trained": {
        "checkpoint": "checkpoint.command",
        "export": "export.command",
        "serve": "serve.command",
        "evaluate": "evaluate.command",
        "torchserve-archive": "torchserve_archive.command",
    },
    "Keys": {
        "secret": "secret.command",
        "certificates": "certificates.command",
        "signing-key": "signing_key.command",
    },
}
_SUBCOMMANDS = {name: target for section in _SECTIONS.values() for name, target in section.items()}


class _Launcher(options.Group):
    sections = _SECTIONS

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
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Start, watch and use jobs of persia. `persia-launcher COMMAND --help` explains a command.

    \b
    A job to start from, for your own Parquet file:
      persia-launcher init my_job --parquet clicks.parquet

    \b
    A whole job on this machine:
      persia-launcher local --nn-worker my_job/train.py --data-loader my_job/data_loader.py \\
          --embedding-config my_job/embedding_config.yml --parameter-servers 2

    \b
    The same, process by process, on one machine or many, in any order. All need PERSIA_NATS_URL:
      persia-launcher nats-server
      persia-launcher embedding-parameter-server --embedding-config embedding_config.yml
      persia-launcher embedding-worker --embedding-config embedding_config.yml
      persia-launcher data-loader data_loader.py
      persia-launcher nn-worker train.py

    Jobs that share a NATS server need different names: PERSIA_JOB_NAME.
    """
