"""Manifests and pointers vouch for themselves: no damaged byte goes unnoticed."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.errors import CorruptionError
from persia.storage.checksummed_json import decode_document, decode_pointer, encode_document, encode_pointer
from persia.storage.location import Location
from persia.storage.manifest import Manifest
from persia.storage.versions import resolve, version_name

VALUES = {"step": 7, "files": [{"path": "a/b.emb", "num_bytes": 100}], "text": 'quoted " and\nlines'}
DOCUMENT = encode_document("persia test", VALUES)


def decoded(content: bytes) -> dict[str, object]:
    return decode_document(content, "d.json", form="persia test")


def test_round_trip() -> None:
    values = decoded(DOCUMENT)
    assert {key: values[key] for key in VALUES} == VALUES
    assert json.loads(DOCUMENT)["version"] == 2


@pytest.mark.parametrize("bit", range(8))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    for position in range(len(DOCUMENT)):
        damaged = bytearray(DOCUMENT)
        damaged[position] ^= 1 << bit
        with pytest.raises(CorruptionError, match=r"d\.json"):
            decoded(bytes(damaged))


@given(st.integers(0, len(DOCUMENT) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_bytes_replaced_added_and_cut_off(position: int, new: bytes, removed: int) -> None:
    damaged = DOCUMENT[:position] + new + DOCUMENT[position + removed :]
    if damaged != DOCUMENT:
        with pytest.raises(CorruptionError, match=r"d\.json"):
            decoded(damaged)


def test_good_json_that_was_changed_is_called_damaged() -> None:
    with pytest.raises(CorruptionError, match=r"d\.json is damaged: its checksum is not that of its bytes"):
        decoded(DOCUMENT.replace(b'"step": 7', b'"step": 6'))
    without = json.dumps({k: v for k, v in json.loads(DOCUMENT).items() if k != "checksum"}).encode()
    with pytest.raises(CorruptionError, match="is damaged"):
        decoded(without)


def test_version_1_had_no_checksum_and_is_read() -> None:
    old = {"format": "persia checkpoint", "version": 1, "created_by": "persia 0", "step": 3}
    assert Manifest.decode(json.dumps(old).encode(), "m.json").step == 3


def test_pointers() -> None:
    content = encode_pointer("step-000000000002")
    assert content.splitlines()[0] == b"step-000000000002"
    assert decode_pointer(content, "latest") == "step-000000000002"
    assert decode_pointer(b"step-000000000001\n", "latest") == "step-000000000001"  # written by hand
    for position in range(len(content) - 1):  # the last line may end or not
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            with contextlib.suppress(CorruptionError):
                found = decode_pointer(bytes(damaged), "latest")
                assert re.fullmatch(r"step-\d{12,20}", found) is None, "the caller refuses what is no name"


def test_a_pointer_with_a_flipped_bit_leads_to_no_other_checkpoint(tmp_path: Path) -> None:
    root = Location.of(tmp_path)
    for step in (2, 3):
        (root / version_name(step) / "manifest.json").replace(Manifest(step=step).encode())
    content = bytearray(encode_pointer(version_name(2)))
    content[len(version_name(2)) - 1] ^= 1
    assert content.startswith(version_name(3).encode())
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CorruptionError, match="latest is damaged: it says 'step-000000000003'"):
        resolve(root)
