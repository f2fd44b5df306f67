"""Damaged checkpoints: what is wrong is named, and the rows that servers have stay as they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from persia.checkpoint.checkpoints import DumpRequest, Source
from persia.errors import CorruptionError, NotFoundError, PersiaError

from .conftest import checkpoints_of, edit_manifest, make_bags, make_server, shard_files, train, unchanged


def _truncate(checkpoint: Path) -> None:
    path = shard_files(checkpoint)[-1]
    path.write_bytes(path.read_bytes()[:-100])


def _flip(position: float) -> Callable[[Path], None]:
    def flip(checkpoint: Path) -> None:
        path = shard_files(checkpoint)[-1]
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 0x10
        path.write_bytes(content)

    return flip


def _remove(checkpoint: Path) -> None:
    shard_files(checkpoint)[0].unlink()


def _swap(checkpoint: Path) -> None:
    first, second = shard_files(checkpoint)[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _foreign(checkpoint: Path) -> None:
    """A whole file of the right length from another dump."""
    bags = make_bags()
    train(bags)
    train(bags, seed=4)
    checkpoints_of(bags).dump(DumpRequest(checkpoint.parent / "other"))
    mine, other = shard_files(checkpoint)[0], shard_files(checkpoint.parent / "other")[0]
    shutil.copyfile(other, mine)
    edit_manifest(
        checkpoint, lambda values: values["embeddings"]["files"][0].update(num_bytes=mine.stat().st_size)
    )


def _newer(checkpoint: Path) -> None:
    edit_manifest(checkpoint, lambda values: values.update(version=99))


def _no_rows(checkpoint: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        removed = values["embeddings"]["files"].pop()
        values["embeddings"]["servers"][0]["num_rows"] -= removed["num_rows"] - 1
        values["embeddings"]["files"][0]["num_rows"] += 1

    edit_manifest(checkpoint, edit)


def _garbage(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("{")


def _other_step(checkpoint: Path) -> None:
    """Good JSON, good fields, one bit of it another."""
    path = checkpoint / "manifest.json"
    assert '"step": 5' in path.read_text()
    path.write_text(path.read_text().replace('"step": 5', '"step": 4'))


def _empty(checkpoint: Path) -> None:
    shard_files(checkpoint)[0].write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (
            _truncate,
            CorruptionError,
            r"embeddings-0-1\.emb has \d+ bytes, the manifest says \d+: it was truncated",
        ),
        (_flip(0.1), CorruptionError, r"embeddings-0-1\.emb, bytes \d+ to \d+: .*checksum"),
        (_flip(0.6), CorruptionError, r"embeddings-0-1\.emb"),
        (_flip(0.99), CorruptionError, r"embeddings-0-1\.emb"),
        (_flip(1.0), CorruptionError, r"embeddings-0-1\.emb"),
        (_remove, NotFoundError, r"embeddings-0-0\.emb is missing, and the manifest names it"),
        (_swap, CorruptionError, r"embeddings-0-[01]\.emb"),
        (_foreign, CorruptionError, r"embeddings-0-0\.emb is not the file that the manifest means"),
        (_newer, CorruptionError, r"manifest\.json has version 99.*use a newer one"),
        (_no_rows, CorruptionError, r"embeddings-0-0\.emb has \d+ rows by its index, \d+ by the manifest"),
        (_other_step, CorruptionError, r"manifest\.json is damaged: its checksum"),
        (_garbage, CorruptionError, r"manifest\.json: not JSON"),
        (_empty, CorruptionError, r"embeddings-0-0\.emb has 0 bytes"),
    ],
)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_damage_is_named_and_changes_nothing(
    damage: Callable[[Path], None],
    kind: type[PersiaError],
    message: str,
    num_servers: int,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    bags = make_bags()
    train(bags, num_ids=500, seed=8)
    checkpoints_of(bags).dump(DumpRequest(tmp_path / "good"))
    servers = checkpoints_of(*(make_server(index, num_servers) for index in range(num_servers)))
    servers.load(Source(tmp_path / "good"))
    with unchanged(servers, tmp_path):
        damage(checkpoint)
        with pytest.raises(kind, match=message):
            servers.load(Source(checkpoint))


def test_damaged_dense_files_are_named(checkpoint: Path) -> None:
    (path,) = checkpoint.glob("dump-*/dense.pt")
    path.write_bytes(b"dxnse")
    with pytest.raises(CorruptionError, match=r"dense\.pt is damaged"):
        Source(checkpoint).dense("dense.pt")


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    source = Source(tmp_path / "nothing")
    assert not source.has_embeddings
    with pytest.raises(NotFoundError, match="nothing is no checkpoint"):
        checkpoints_of(make_bags()).load(source)
    checkpoints_of(make_bags()).dump(DumpRequest(tmp_path / "d", dense={"dense.pt": b"1"}, embeddings=False))
    with pytest.raises(NotFoundError, match="has no embeddings"):
        checkpoints_of(make_bags()).load(Source(tmp_path / "d"))
