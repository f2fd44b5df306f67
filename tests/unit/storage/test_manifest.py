"""The manifest is read without trust: it may come from anywhere."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.config import SlotConfig, SlotsConfig
from persia.errors import CorruptionError, InvalidArgumentError, NotFoundError
from persia.storage.location import Location
from persia.storage.manifest import (
    DenseSection,
    EmbeddingSection,
    FileEntry,
    Manifest,
    ServerEntry,
    check_file_name,
    is_dump_id,
    make_dump_id,
)
from persia.storage.schema import RowSchema
from persia.validation import to_json
from tests.unit.checkpoint.conftest import sealed

ID = "dump-20260131T120000Z-1a2b3c4d"
FILE = FileEntry(path=f"{ID}/embeddings-0-0.emb", num_bytes=10, checksum="00", num_rows=3)
MANIFEST = Manifest(
    step=7,
    dense=DenseSection(
        dump_id=ID,
        created_at="2026-01-01T00:00:00Z",
        files={"dense.pt": FileEntry(path=f"{ID}/dense.pt", num_bytes=5, checksum="11", num_rows=0)},
    ),
    embeddings=EmbeddingSection(
        dump_id=ID,
        created_at="2026-01-01T00:00:00Z",
        train_config="00ff",
        schema=RowSchema.of(SlotsConfig(slots_config={"user": SlotConfig(dim=4)})),
        servers=(ServerEntry(step=9, num_rows=3),),
        files=(FILE,),
        optimizer={"name": "SGD", "lr": 0.1},
    ),
)


def decoded(**changes: Any) -> Manifest:
    return Manifest.decode(sealed({**json.loads(MANIFEST.encode()), **changes}), "m.json")


def test_round_trip() -> None:
    assert decoded() == MANIFEST
    assert Manifest.decode(Manifest().encode(), "m.json") == Manifest()


def test_newer_version_names_both() -> None:
    with pytest.raises(
        CorruptionError, match=r"m\.json has version 3, this persia .* up to 2: use a newer one"
    ):
        decoded(version=3)


def embeddings(**changes: Any) -> dict[str, Any]:
    return {**json.loads(MANIFEST.encode())["embeddings"], **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "no manifest of a persia checkpoint"),
        ({"version": "1"}, "version='1' must be a valid integer"),
        ({"step": -1}, "step=-1 must be at least 0"),
        ({"embeddings": embeddings(num_virtual_shards=8)}, "num_virtual_shards=8 must be 4096"),
        ({"embeddings": embeddings(train_config="xyz")}, "train_config='xyz' must match pattern"),
        ({"embeddings": embeddings(servers=[{"step": 1, "num_rows": 4}])}, "have 3 rows, its servers had 4"),
        ({"embeddings": embeddings(files={})}, "files={} must be a valid list"),
        ({"dense": []}, r"dense must be a mapping of keys to values, not \[\]"),
    ],
)
def test_nonsense_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        decoded(**changes)


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", f"{ID}/../../x", f"{ID}/..", f"{ID}/.x", "dense.pt", f"{ID}/a/b"]
)
def test_paths_stay_in_the_checkpoint(path: str) -> None:
    with pytest.raises(CorruptionError, match=r"path='.*' must match pattern"):
        decoded(embeddings=embeddings(files=[{**to_json(FILE), "path": path}]))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_corruption(content: bytes) -> None:
    with pytest.raises(CorruptionError):
        Manifest.decode(content, "m.json")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["step", "dense", "embeddings", "created_by", "version"]), _VALUES)
def test_any_value_is_accepted_or_corruption(key: str, value: Any) -> None:
    with contextlib.suppress(CorruptionError):
        decoded(**{key: value})


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ((), "created_by"),
        (("embeddings",), "num_virtual_shards"),
        (("embeddings", "files", 0), "num_rows"),
        (("dense", "files", "dense.pt"), "num_rows"),
    ],
)
def test_a_manifest_that_lacks_a_key_is_refused(path: tuple[Any, ...], key: str) -> None:
    values = json.loads(MANIFEST.encode())
    part = functools.reduce(operator.getitem, path, values)
    del part[key]
    with pytest.raises(CorruptionError, match=key):
        Manifest.decode(sealed(values), "m.json")


def test_a_directory_without_one_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"is no checkpoint: it has no manifest\.json"):
        Manifest.read(Location.of(tmp_path))


def test_names() -> None:
    assert is_dump_id(make_dump_id())
    assert not is_dump_id("dump-1")
    check_file_name("my_model.pt")
    for name in ("../x", "a/b", "", "manifest.json", ".hidden", ID):
        with pytest.raises(InvalidArgumentError, match="not usable as the name"):
            check_file_name(name)
