"""`persia-launcher local`: a whole job on one machine."""

from __future__ import annotations

import click

__all__ = ["command"]

_COUNT = click.IntRange(min=1)


@click.command("local")
@click.option(
    "--nn-worker",
    required=True,
    envvar="PERSIA_NN_WORKER_ENTRY",
    show_envvar=True,
    metavar="FILE",
    help="Training script.",
)
@click.option(
    "--data-loader",
    envvar="PERSIA_DATALOADER_ENTRY",
    show_envvar=True,
    metavar="FILE",
    help="Data loading script; without it the training script makes its batches itself.",
)
@click.option(
    "--embedding-config",
    required=True,
    envvar="PERSIA_EMBEDDING_CONFIG",
    show_envvar=True,
    metavar="FILE",
    help="Slots and their dimensions (YAML).",
)
@click.option(
    "--global-config",
    envvar="PERSIA_GLOBAL_CONFIG",
    show_envvar=True,
    metavar="FILE",
    help="Settings of the servers (YAML); without it, the defaults.",
)
@click.option(
    "--parameter-servers",
    type=_COUNT,
    default=1,
    show_default=True,
    help="Embedding parameter servers, each holding a share of the rows.",
)
@click.option("--embedding-workers", type=_COUNT, default=1, show_default=True)
@click.option("--data-loaders", type=_COUNT, default=1, show_default=True)
@click.option(
    "--nproc-per-node", type=_COUNT, default=1, show_default=True, help="Ranks of the training script."
)
@click.option(
    "--loader-args",
    default="",
    metavar="TEXT",
    help="Arguments of the data loading script, quoted as in a shell.",
)
@click.option(
    "--job-name",
    envvar="PERSIA_JOB_NAME",
    show_envvar=True,
    default="default",
    show_default=True,
    help="Keeps jobs that share a NATS server apart.",
)
@click.option(
    "--nats-url",
    metavar="URL",
    help="Use this NATS server instead of starting one. PERSIA_NATS_URL is not read: a job of its own needs "
    "no server that others use.",
)
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def command(
    nn_worker: str,
    data_loader: str | None,
    embedding_config: str,
    global_config: str | None,
    parameter_servers: int,
    embedding_workers: int,
    data_loaders: int,
    nproc_per_node: int,
    loader_args: str,
    job_name: str,
    nats_url: str | None,
    script_args: tuple[str, ...],
) -> None:
    """Run a whole job on this machine: NATS, servers, data loaders and training, on free ports.

    Ends when the training script has ended, with its exit code. When any process fails, or on Ctrl-C, all of
    them are stopped. SCRIPT_ARGS, best after --, go to the training script.
    """
    import shlex
    import sys

    from persia.launcher.local_job import LocalJob, run_local_job

    job = LocalJob(
        nn_worker=nn_worker,
        data_loader=data_loader,
        embedding_config=embedding_config,
        global_config=global_config,
        parameter_servers=parameter_servers,
        embedding_workers=embedding_workers,
        data_loaders=data_loaders,
        nproc_per_node=nproc_per_node,
        script_args=script_args,
        loader_args=tuple(shlex.split(loader_args)),
        job_name=job_name,
        nats_url=nats_url,
    )
    sys.exit(run_local_job(job))
