"""`persia-launcher export`: a checkpoint in the formats of other servers."""

from __future__ import annotations

from pathlib import Path

import click

from persia.launcher import options
from persia.launcher.options import option


@click.command("export")
@click.argument("checkpoint")
@click.argument("output", type=click.Path(path_type=Path, file_okay=False))
@option(
    "--format",
    "kind",
    # Those of persia.serving.exporting, which imports torch; a test compares.
    type=click.Choice(["torch", "torch-export", "aoti", "onnx", "triton"]),
    default="torch",
    help="onnx needs onnx and onnxscript; aoti needs a C++ compiler.",
)
@options.embedding_config("Slots of the job that wrote the checkpoint (YAML).", required=True)
@option("--model-name", default="model", help="Name of the model in a Triton repository.")
@option(
    "--max-gib", type=click.FloatRange(min=0, min_open=True), default=8.0, help="Of rows and keys, at most."
)
@options.verify_key
@options.trust_scripts
def command(
    checkpoint: str, output: Path, kind: str, embedding_config: str, model_name: str, max_gib: float
) -> None:
    """Write CHECKPOINT, rows and dense model, to the new directory OUTPUT, for servers that know no persia.

    \b
    CHECKPOINT is a directory or URL that dump_checkpoint(..., with_jit_model=True) wrote, of a training that
    forwarded a batch; of a directory of checkpoints the one that `latest` names.
      torch         model.pt, TorchScript
      torch-export  model.pt2, for torch.export.load
      aoti          model.pt2, compiled for this kind of machine by AOTInductor
      onnx          model.onnx
      triton        MODEL_NAME/, a folder of a Triton model repository
    """
    from persia.config import load_embedding_config
    from persia.serving.exporting import export_to

    slots = load_embedding_config(embedding_config)
    files = export_to(checkpoint, output, kind, slots, name=model_name, max_bytes=int(max_gib * (1 << 30)))
    for file in files:
        click.echo(file)
