"""A packet's manifest is read without trust, and a directory of packets shows whole ones only."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.config import SlotConfig, SlotsConfig
from persia.errors import CorruptionError, NotFoundError
from persia.packets.log import PacketLog
from persia.packets.packet import Base, BaseKind, CheckpointReference, Packet
from persia.storage.manifest import FileEntry, ServerEntry, make_dump_id
from persia.storage.position import Position, is_packet_folder, make_stream_id
from persia.storage.schema import RowSchema
from tests.unit.checkpoint.conftest import sealed

STREAM = "20260101T000000Z-0123abcd"
AT = Position(STREAM, 2)
FOLDER = AT.make_folder()
PACKET = Packet(
    position=AT,
    changed_after=1000.25,
    cut_at=1001.5,
    step=7,
    train_config="00ff",
    schema=RowSchema.of(SlotsConfig(slots_config={"user": SlotConfig(dim=4)})),
    servers=(ServerEntry(step=9, num_rows=3), ServerEntry(step=8, num_rows=0)),
    files=(FileEntry(path=f"{FOLDER}/rows-0-0.emb", num_bytes=10, checksum="00", num_rows=3),),
    dense={"dense.pt": FileEntry(path=f"{FOLDER}/dense.pt", num_bytes=5, checksum="11", num_rows=0)},
    dense_step=6,
    checkpoint=CheckpointReference(url="/models/ads", dump_id=make_dump_id(), number=1),
)
RESTART = Packet(
    position=Position(STREAM, 1),
    changed_after=1000.0,
    cut_at=1000.0,
    base=Base(kind=BaseKind.CHECKPOINT, reason="a checkpoint was loaded", dump_id=make_dump_id()),
)


def decoded(**changes: Any) -> Packet:
    return Packet.decode(sealed({**json.loads(PACKET.encode()), **changes}), "p.json")


def at(number: int) -> Packet:
    """A restart, which needs no files."""
    return dataclasses.replace(RESTART, position=Position(STREAM, number))


@pytest.mark.parametrize("packet", [PACKET, RESTART])
def test_round_trip(packet: Packet) -> None:
    assert Packet.decode(packet.encode(), "p.json") == packet


def test_newer_version_names_both() -> None:
    with pytest.raises(
        CorruptionError, match=r"p\.json has version 3, this persia .* up to 2: use a newer one"
    ):
        decoded(version=3)


OTHER = f"{Position(STREAM, 3).make_folder()}/rows-0-0.emb"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "persia checkpoint"}, "no manifest of a persia packet"),
        ({"number": 0}, "number is 0"),
        ({"number": 1}, "first packet must say what it follows"),
        ({"number": 10**12}, "number=1000000000000 must be at most"),
        ({"stream": "../x"}, "stream='../x' must match pattern"),
        ({"cut_at": -1}, "cut_at=-1 must"),
        ({"cut_at": float("nan")}, "cut_at=nan must be a finite number"),
        ({"cut_at": True}, "cut_at=true must"),
        ({"num_virtual_shards": 8}, "num_virtual_shards=8 must be 4096"),
        ({"train_config": "xyz"}, "train_config='xyz' must match pattern"),
        ({"train_config": None}, "it has rows, and no train_config"),
        ({"is_from_nothing": 1}, "is_from_nothing=1 must be a valid boolean"),
        ({"servers": [{"step": 1, "num_rows": 4}]}, "have 3 rows, its servers sent others"),
        ({"files": {}}, "files={} must be a valid list"),
        ({"files": [{"path": OTHER, "num_bytes": 1, "checksum": "", "num_rows": 3}]}, "is no file of packet"),
        ({"files": [{"path": "../../x", "num_bytes": 1, "checksum": "", "num_rows": 3}]}, "path"),
        ({"dense": {"../x": {}}}, "the name '../x', which must match pattern"),
        ({"base": {"kind": "nothing", "reason": ""}}, "has rows itself"),
        ({"base": {"kind": "else", "reason": ""}}, "base"),
        ({"base": {"kind": "checkpoint", "reason": ""}}, "base of kind 'checkpoint' has dump_id None"),
        (
            {"base": {"kind": "checkpoint", "reason": "", "dump_id": "../x"}},
            "dump_id='../x' must match pattern",
        ),
        ({"checkpoint": []}, "checkpoint"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        decoded(**changes)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(json.loads(PACKET.encode()))), JSON_VALUES, min_size=1))
def test_any_change_is_read_or_refused_by_type(changes: dict[str, Any]) -> None:
    with contextlib.suppress(CorruptionError):
        assert Packet.decode(decoded(**changes).encode(), "p.json") == decoded(**changes)


@given(st.binary(max_size=200), st.integers(0, len(PACKET.encode())))
def test_damaged_bytes(junk: bytes, cut: int) -> None:
    for content in (junk, PACKET.encode()[:cut], PACKET.encode()[:cut] + junk):
        with contextlib.suppress(CorruptionError):
            Packet.decode(content, "p.json")


@pytest.mark.parametrize(
    "key", ["files", "servers", "dense", "is_from_nothing", "num_virtual_shards", "created_by"]
)
def test_a_packet_that_lacks_a_key_is_refused(key: str) -> None:
    values = json.loads(PACKET.encode())
    del values[key]
    with pytest.raises(CorruptionError, match=key):
        Packet.decode(sealed(values), "p.json")


def test_names_sort_and_parse() -> None:
    positions = [Position(make_stream_id(), 1), AT, AT.next, Position(STREAM, 1)]
    assert sorted(positions) == sorted(positions, key=lambda position: position.name)
    assert [Position.parse(position.name) for position in positions] == positions
    assert Position.parse(FOLDER) == AT
    assert is_packet_folder(FOLDER)
    assert not is_packet_folder(AT.name)
    assert Position.parse("packet-x-1") is None


@pytest.mark.parametrize("where", ["local", "memory"])
def test_log(where: str, tmp_path: Path) -> None:
    url = str(tmp_path / "log") if where == "local" else f"memory://{tmp_path.name}"
    log = PacketLog(url)
    assert log.newest() is None
    assert log.positions() == []
    for number in (1, 2, 3):
        log.add(at(number))
    assert log.newest() == Position(STREAM, 3)
    assert log.read(AT) == at(2)
    with pytest.raises(NotFoundError, match=f"no packet {STREAM}/4"):
        log.read(Position(STREAM, 4))
    log.remove_until(Position(STREAM, 1))
    assert log.positions(STREAM) == [AT, AT.next]
    assert log.positions("another") == []


def test_newest_when_the_pointer_is_late_or_missing(tmp_path: Path) -> None:
    log = PacketLog(tmp_path)
    log.add(at(1))
    pointer = (tmp_path / "latest").read_bytes()
    log.add(at(2))
    (tmp_path / "latest").write_bytes(pointer)
    assert log.newest() == AT
    (tmp_path / "latest").unlink()
    assert log.newest() == AT
    (tmp_path / "latest").write_bytes(b"../../etc\n")
    with pytest.raises(CorruptionError, match="not the name of a packet"):
        log.newest()


def test_a_manifest_under_another_name_is_refused(tmp_path: Path) -> None:
    log = PacketLog(tmp_path)
    log.add(at(2))
    (tmp_path / "manifests" / f"{AT.name}.json").rename(tmp_path / "manifests" / f"{AT.next.name}.json")
    with pytest.raises(CorruptionError, match=f"is of packet {STREAM}/2"):
        log.read(AT.next)


def test_a_manifest_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    log = PacketLog(tmp_path)
    log.add(at(2))
    path = tmp_path / "manifests" / f"{AT.name}.json"
    content = path.read_bytes()
    at_time = content.index(b'"cut_at": 1000.0') + len('"cut_at": 100')
    path.write_bytes(content[:at_time] + b"1" + content[at_time + 1 :])
    with pytest.raises(CorruptionError, match=rf"{AT.name}\.json is damaged: its checksum"):
        log.read(AT)


def test_files_of_all_attempts_go_with_old_packets(tmp_path: Path) -> None:
    log = PacketLog(tmp_path)
    log.add(at(2))
    killed = Position("20200101T000000Z-00000000", 99)  # an attempt of a trainer that was killed
    folders = [log.files / position.make_folder() for position in (AT, AT, AT.next, killed)]
    for folder in folders:
        (folder / "rows-0-0.emb").replace(b"x")
    log.remove_until(AT)
    assert [child.name for child in log.files.children()] == [folders[2].name]
