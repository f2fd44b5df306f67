"""`persia-launcher torchserve-archive`: a checkpoint as a version of a TorchServe model."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("torchserve-archive")
@click.argument("checkpoint")
@click.option("--model-name", default="model", show_default=True, help="What requests call it.")
@click.option("--version", help="Name of this version; default: the checkpoint's training step.")
@click.option(
    "--export-path",
    type=click.Path(file_okay=False),
    default="model_store",
    show_default=True,
    help="Folder to write to: TorchServe's model_store.",
)
@click.option(
    "--embedding-config",
    envvar="PERSIA_EMBEDDING_CONFIG",
    show_envvar=True,
    metavar="FILE",
    help="Slots of the job that wrote the checkpoint (YAML). Needed to load rows into TorchServe.",
)
@click.option(
    "--embedding-worker",
    "embedding_workers",
    multiple=True,
    metavar="HOST:PORT",
    help="Take rows from this embedding worker instead of the checkpoint; give it once for each worker.",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes that answer. Each holds all rows, unless embedding workers do.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help='Requests computed at once. Above 1, gRPC clients are to look for an "error" in their answers.',
)
def command(
    checkpoint: str,
    model_name: str,
    version: str | None,
    export_path: str,
    embedding_config: str | None,
    embedding_workers: tuple[str, ...],
    processes: int,
    batch_size: int,
) -> None:
    """Write MODEL_NAME-VERSION.mar, with which TorchServe serves CHECKPOINT.

    \b
    CHECKPOINT is a directory or URL that dump_checkpoint(..., with_jit_model=True) wrote; of a directory of
    checkpoints the one that `latest` names now. The archive refers to it, and TorchServe must reach it there.
      persia-launcher torchserve-archive model/ --model-name ads --embedding-config embedding_config.yml
      torchserve --start --ts-config config.properties --model-store model_store --models ads-1200.mar
    """
    from pathlib import Path

    from persia.serving.archive import WorkerSettings, write_archive

    path = write_archive(
        Path(export_path),
        model_name,
        checkpoint,
        version=version,
        embedding_config=embedding_config,
        embedding_workers=embedding_workers,
        workers=WorkerSettings(minWorkers=processes, maxWorkers=processes, batchSize=batch_size),
    )
    click.echo(path)
