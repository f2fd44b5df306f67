"""`persia-launcher torchserve-archive`: a checkpoint as a version of a TorchServe model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from persia.launcher import options
from persia.launcher.options import COUNT, option


@click.command("torchserve-archive")
@click.argument("checkpoint")
@options.model_name
@option("--version", help="Name of this version; default: the checkpoint's training step.")
@option(
    "--export-path",
    type=click.Path(file_okay=False, path_type=Path),
    default="model_store",
    help="Folder to write to: TorchServe's model_store.",
)
@options.embedding_config(
    "Slots of the job that wrote the checkpoint (YAML). Needed to load rows into TorchServe."
)
@options.embedding_workers
@options.verify_key
@options.trust_scripts
@option(
    "--processes",
    type=COUNT,
    default=1,
    help="Processes that answer. Each holds all rows, unless embedding workers do.",
)
@option(
    "--batch-size",
    type=COUNT,
    default=1,
    help='Requests computed at once. Above 1, gRPC clients are to look for an "error" in their answers.',
)
def command(
    checkpoint: str, model_name: str, export_path: Path, processes: int, batch_size: int, **given: Any
) -> None:
    """Write MODEL_NAME-VERSION.mar, with which TorchServe serves CHECKPOINT.

    \b
    CHECKPOINT is a directory or URL that dump_checkpoint(..., with_jit_model=True) wrote; of a directory of
    checkpoints the one that `latest` names now. The archive refers to it, and TorchServe must reach it there.
      persia-launcher torchserve-archive model/ --model-name ads --embedding-config embedding_config.yml
      torchserve --start --ts-config config.properties --model-store model_store --models ads-1200.mar
    """
    from persia.serving.archive import WorkerSettings, write_archive

    # Both the same: TorchServe must not add processes by itself, as each may hold all rows.
    workers = WorkerSettings(minWorkers=processes, maxWorkers=processes, batchSize=batch_size)
    click.echo(write_archive(export_path, model_name, checkpoint, workers=workers, **given))
