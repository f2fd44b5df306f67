"""Directories of checkpoints: the newest are kept, `latest` follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia.errors import CorruptionError, InvalidArgumentError, NotFoundError
from persia.storage.location import Location
from persia.storage.manifest import Manifest
from persia.storage.versions import keep_newest, resolve, set_latest, version_name


def make(root: Path, step: int) -> str:
    name = version_name(step)
    (Location.of(root) / name / "manifest.json").replace(Manifest(step=step).encode())
    return name


def publish(root: Location, step: int, *, keep_last: int) -> None:
    name = make(Path(root.path), step)
    set_latest(root, name)
    keep_newest(root, name, keep_last)


def kept(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    root = Location.of(tmp_path)
    for step in (1, 20, 300, 4000):
        publish(root, step, keep_last=2)
        assert resolve(root).name == version_name(step)
    assert kept(tmp_path) == [300, 4000]
    publish(root, 5000, keep_last=1)
    assert kept(tmp_path) == [5000]


def test_a_run_begun_again_from_an_older_step_replaces_the_newer_ones(tmp_path: Path) -> None:
    root = Location.of(tmp_path)
    for step in (10, 20, 30):
        publish(root, step, keep_last=3)
    publish(root, 15, keep_last=2)
    assert resolve(root).name == version_name(15)
    assert kept(tmp_path) == [10, 15]


def test_a_checkpoint_is_itself(tmp_path: Path) -> None:
    make(tmp_path, 1)
    assert resolve(Location.of(tmp_path / version_name(1))).name == version_name(1)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    root = Location.of(tmp_path)
    with pytest.raises(NotFoundError, match=r"neither manifest\.json nor latest"):
        resolve(root)
    make(tmp_path, 3)
    (root / "latest").replace(b"step-000000000009\n")
    with pytest.raises(NotFoundError, match="names step-000000000009, .*; those there: step-000000000003"):
        resolve(root)
    (root / "latest").replace(b"../../etc")
    with pytest.raises(CorruptionError, match="not the name of a step's folder"):
        resolve(root)
    with pytest.raises(InvalidArgumentError, match="must not be negative"):
        version_name(-1)
