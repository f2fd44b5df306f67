"""`persia-launcher signing-key`: the keys that sign checkpoints and packets."""

from __future__ import annotations

from pathlib import Path

import click

from persia.launcher.options import Group


@click.group("signing-key", cls=Group)
def command() -> None:
    """Keys that sign checkpoints and packets."""


@command.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
def create(path: Path) -> None:
    """Write a new private key to PATH, for its owner alone, and its public key to PATH.pub.

    \b
    Give the private key to the training, and the public one to whatever loads what the training writes:
      persia-launcher signing-key create ads.key
      persia-launcher nn-worker --sign-key ads.key train.py
      persia-launcher serve model/ --verify-key ads.key.pub --embedding-config embedding_config.yml
    """
    from persia.storage.signing import create_key

    private, public = create_key(path)
    click.echo(f"private key: {private} (keep it secret)\npublic key: {public}")
