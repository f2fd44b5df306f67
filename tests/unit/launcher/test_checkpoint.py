"""`persia-launcher checkpoint`: what is in a checkpoint, is it whole, what has changed, export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from persia.config import SlotConfig, SlotsConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import FailedPreconditionError
from persia.launcher import cli
from persia.nn import EmbeddingBagCollection

SLOTS = SlotsConfig(slots_config={"user": SlotConfig(dim=4), "item": SlotConfig(dim=8)})


def make_bags(**options: Any) -> EmbeddingBagCollection:
    config = EmbeddingConfig(emb_initialization=(-0.5, 0.5), seed=1)
    return EmbeddingBagCollection(
        SLOTS, optimizer=SGD(lr=0.5), embedding_config=config, num_threads=1, **options
    )


def ids_of(*slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One sample with the IDs of each slot."""
    return torch.tensor([one for ids in slots for one in ids]), torch.tensor([[len(ids)] for ids in slots])


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])


def ran(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def bags(tmp_path: Path) -> EmbeddingBagCollection:
    made = make_bags()
    made(*ids_of([1, 2, 3], [7, 8]))
    made.dump(tmp_path / "a", step=10)
    return made


def test_inspect_tells_what_is_there(bags: EmbeddingBagCollection, tmp_path: Path) -> None:
    values = ran("inspect", tmp_path / "a")
    assert (values["step"], values["embeddings"]["num_rows"]) == (10, 5)
    assert values["embeddings"]["optimizer"]["lr"] == 0.5
    text = run("inspect", tmp_path / "a").stdout
    for part in ("SGD", "user", "item", "embeddings-0-0.emb", "5 rows"):
        assert part in text
    assert run("inspect", tmp_path / "nothing").exit_code == 1


def test_verify_names_what_is_broken(bags: EmbeddingBagCollection, tmp_path: Path) -> None:
    assert ran("verify", tmp_path / "a")["whole"] is True
    assert run("verify", tmp_path / "a").exit_code == 0
    (path,) = (tmp_path / "a").glob("dump-*/*.emb")
    content = bytearray(path.read_bytes())
    content[150] ^= 1
    path.write_bytes(content)
    result = run("verify", tmp_path / "a", "--json")
    assert result.exit_code == 1
    (error,) = json.loads(result.stdout)["files"].values()
    assert "embeddings-0-0.emb" in error
    path.unlink()
    result = run("verify", tmp_path / "a")
    assert result.exit_code == 1
    assert "is missing" in result.stdout.replace("\n", "")


def test_verify_asks_for_the_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created = CliRunner().invoke(cli, ["signing-key", "create", str(tmp_path / "job.key")])
    assert created.exit_code == 0, created.output
    monkeypatch.setenv("PERSIA_VERIFY_KEY", "")  # the option sets it for the process: undone after the test
    for name, key in (("unsigned", ""), ("signed", str(tmp_path / "job.key"))):
        monkeypatch.setenv("PERSIA_SIGN_KEY", key)
        bags = make_bags()
        bags(*ids_of([1, 2, 3], [7, 8]))
        bags.dump(tmp_path / name, step=10)
    public = tmp_path / "job.key.pub"
    assert run("verify", tmp_path / "signed", "--verify-key", public).exit_code == 0
    monkeypatch.setenv("PERSIA_VERIFY_KEY", "")
    assert run("verify", tmp_path / "unsigned").exit_code == 0
    result = run("verify", tmp_path / "unsigned", "--verify-key", public)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert f"{tmp_path / 'unsigned' / 'manifest.json'} is not signed, and must be by {public}" in line
    assert "--sign-key" in line


def test_diff_counts_and_measures(bags: EmbeddingBagCollection, tmp_path: Path) -> None:
    # Users 1 and 3 move by (0.5, 0.5, 0.5, 0.5), user 4 is new; items stay.
    pooled = bags(*ids_of([1, 3, 4], []))
    pooled[:, :4].sum().backward()
    bags.dump(tmp_path / "b")
    changes = ran("diff", tmp_path / "a", tmp_path / "b")
    user, item = changes["user"], changes["item"]
    assert [user[key] for key in ("num_before", "num_after", "num_added", "num_removed", "num_moved")] == [
        *(3, 4, 1, 0, 2)
    ]
    assert user["mean_move"] == pytest.approx(1.0, rel=1e-6)
    assert user["max_move"] == pytest.approx(1.0, rel=1e-6)
    assert (item["num_before"], item["num_after"], item["num_moved"]) == (2, 2, 0)
    assert item["mean_norm_before"] == item["mean_norm_after"] > 0
    back = ran("diff", tmp_path / "b", tmp_path / "a")
    assert (back["user"]["num_removed"], back["user"]["num_added"]) == (1, 0)
    assert "mean move" in run("diff", tmp_path / "a", tmp_path / "b").stdout


def test_parquet_has_the_rows(bags: EmbeddingBagCollection, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert ran("export", tmp_path / "a", tmp_path / "rows") == {"item.parquet": 2, "user.parquet": 3}
    table = parquet.read_table(tmp_path / "rows" / "user.parquet").sort_by("id")
    assert table.column("id").to_pylist() == [1, 2, 3]
    bags.eval()
    for row in table.to_pylist():
        pooled = bags(*ids_of([row["id"]], []))
        assert pooled[0, :4].tolist() == row["embedding"]


def test_numpy_has_the_rows(bags: EmbeddingBagCollection, tmp_path: Path) -> None:
    assert ran("export", tmp_path / "a", tmp_path / "rows", "--format", "numpy") == {"item": 2, "user": 3}
    ids = np.load(tmp_path / "rows" / "item.ids.npy")
    embeddings = np.load(tmp_path / "rows" / "item.embeddings.npy")
    assert (ids.dtype, embeddings.dtype, embeddings.shape) == (np.uint64, np.float32, (2, 8))
    bags.eval()
    for one, embedding in zip(ids, embeddings, strict=True):
        assert bags(*ids_of([], [int(one)]))[0, 4:].tolist() == embedding.tolist()
    result = run("export", tmp_path / "a", tmp_path / "rows")
    assert result.exit_code == 1


def test_a_collection_comes_back(bags: EmbeddingBagCollection, tmp_path: Path) -> None:
    other = make_bags()
    other.load(tmp_path / "a")
    everything = ids_of([1, 2, 3], [7, 8])
    for module in (bags, other):
        module.eval()
    assert torch.equal(bags(*everything), other(*everything))
    assert other.stats().num_rows == 5


def test_a_collection_without_its_optimizers_state(bags: EmbeddingBagCollection, tmp_path: Path) -> None:
    bags.dump(tmp_path / "b", with_state=False)
    assert "left out (with_state=False)" in run("inspect", tmp_path / "b").stdout
    assert run("verify", tmp_path / "b").exit_code == 0
    assert ran("export", tmp_path / "b", tmp_path / "rows", "--with-state") == {
        "item.parquet": 2,
        "user.parquet": 3,
    }
    other = make_bags()
    with pytest.raises(FailedPreconditionError, match="without the optimizer's state"):
        other.load(tmp_path / "b")
    other.load(tmp_path / "b", with_state=False)
    assert other.stats().num_rows == 5


def _nothing(place: Path, whole: Path) -> None:
    """There is no such directory."""


def _a_file(place: Path, whole: Path) -> None:
    place.write_bytes(b"\x00" * 100)


def _empty_directory(place: Path, whole: Path) -> None:
    place.mkdir()


def _truncated_manifest(place: Path, whole: Path) -> None:
    shutil.copytree(whole, place)
    manifest = place / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])


def _flipped_manifest(place: Path, whole: Path) -> None:
    shutil.copytree(whole, place)
    manifest = place / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 10', b'"step": 11'))


def _foreign_manifest(place: Path, whole: Path) -> None:
    place.mkdir()
    (place / "manifest.json").write_text('{"name": "an app", "icons": []}')


def _latest_of_nothing(place: Path, whole: Path) -> None:
    shutil.copytree(whole, place / "step-000000000010")
    (place / "latest").write_text("step-000000000020\n")


def _packets(place: Path, whole: Path) -> None:
    place.mkdir()
    (place / "latest").write_text("packet-20260131T120000Z-1a2b3c4d-000000000001\n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_nothing, "is no checkpoint: it has neither manifest.json nor latest"),
        (_a_file, "Not a directory"),
        (_empty_directory, "is no checkpoint: it has neither manifest.json nor latest"),
        (_truncated_manifest, "manifest.json: not JSON"),
        (_flipped_manifest, "manifest.json is damaged: its checksum"),
        (_foreign_manifest, "manifest.json is no manifest of a persia checkpoint"),
        (_latest_of_nothing, "which is no checkpoint; those there: step-000000000010"),
        (_packets, "not the name of a step's folder"),
    ],
)
def test_what_is_no_checkpoint_is_said_in_one_line(
    make: Callable[[Path, Path], None], message: str, bags: EmbeddingBagCollection, tmp_path: Path
) -> None:
    place, whole = tmp_path / "place", tmp_path / "a"
    make(place, whole)
    for arguments in (
        ("inspect", place),
        ("verify", place),
        ("export", place, tmp_path / "rows"),
        ("diff", place, whole),
        ("diff", whole, place),
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("persia-launcher: ")
        assert str(place) in line
        assert message in line
    assert not (tmp_path / "rows").exists()


def test_help_teaches() -> None:
    text = run("--help").stdout
    for name in ("inspect", "verify", "diff", "export"):
        assert name in text
        assert run(name, "--help").exit_code == 0
