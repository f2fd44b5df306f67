"""What services say about themselves is checked before it is believed."""

import dataclasses
import json
from unittest.mock import Mock

import pytest

from persia.errors import CorruptionError
from persia.messaging.discovery import EventKind, ServiceEvent, ServiceInfo

INFO = ServiceInfo(
    role="embedding-worker",
    index=1,
    replicas=2,
    incarnation=0xAB,
    address="127.0.0.1:80",
    schema="0123",
    pid=42,
    slot_modes=("", "asynchronous", "hybrid 12", "synchronous"),
)


def test_round_trip():
    assert ServiceInfo.decode(INFO.encode()) == INFO


def test_incarnation_is_16_hex_digits_on_the_wire():
    assert json.loads(INFO.encode())["incarnation"] == "00000000000000ab"


def test_keys_of_a_newer_version_are_ignored():
    assert ServiceInfo.decode(json.dumps({**json.loads(INFO.encode()), "new": 1}).encode()) == INFO


@pytest.mark.parametrize(
    "change",
    [
        {"role": "boss"},
        {"role": None},
        {"index": 2},
        {"index": "0"},
        {"replicas": 0},
        {"replicas": 10**9},
        {"incarnation": "ab"},
        {"incarnation": "x" * 16},
        {"incarnation": 171},
        {"address": None},
        {"schema": 3},
        {"pid": -1},
        {"moved_shards": [[4096, 1]]},
        {"moved_shards": [[7, 2]]},
        {"moved_shards": [[7, 0], [7, 1]]},
        {"slot_modes": "synchronous"},
        {"slot_modes": [4]},
        {"slot_modes": ["hybrid"]},
        {"slot_modes": ["hybrid 0"]},
        {"slot_modes": ["hybrid 1" + "0" * 30]},
        {"slot_modes": ["synchronous\n"]},
        {"slot_modes": [""] * 33},
        {"slot_modes": []},
    ],
)
def test_impossible_infos_are_refused(change):
    with pytest.raises(CorruptionError, match=next(iter(change))):
        ServiceInfo.decode(json.dumps({**json.loads(INFO.encode()), **change}).encode())


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(ServiceInfo)])
def test_missing_keys_are_refused(key):
    values = json.loads(INFO.encode())
    del values[key]
    with pytest.raises(CorruptionError, match=f"{key} is missing: .* another version of persia"):
        ServiceInfo.decode(json.dumps(values).encode())


@pytest.mark.parametrize("kind", EventKind)
def test_announcements_round_trip(kind):
    event = ServiceEvent(kind, INFO)
    assert ServiceEvent.decode(event.encode()) == event


@pytest.mark.parametrize(
    "change",
    [{"kind": "JOINED"}, {"kind": None}, {"kind": ["left"]}, {"info": {"role": "boss"}}, {"info": 1}],
)
def test_impossible_announcements_are_refused(change):
    values = {**json.loads(ServiceEvent(EventKind.LEFT, INFO).encode()), **change}
    with pytest.raises(CorruptionError, match=f"discovery event: .*{next(iter(change))}"):
        ServiceEvent.decode(json.dumps(values).encode())
    with pytest.raises(CorruptionError, match="kind is missing"):
        ServiceEvent.decode(INFO.encode())


def test_services_without_slots_have_no_modes():
    info = dataclasses.replace(INFO, role="data-loader", slot_modes=())
    assert ServiceInfo.decode(info.encode()) == info


def test_text_for_people_names_the_essentials():
    assert str(INFO) == "embedding-worker 1 of 2 at 127.0.0.1:80 (pid 42)"


def test_a_server_that_was_replaced_is_told_of_once(monkeypatch):
    logger = Mock()
    monkeypatch.setattr("persia.messaging.discovery.get_default_logger", lambda: logger)
    replaced = dataclasses.replace(INFO, incarnation=0xAC)
    successor = dataclasses.replace(INFO, incarnation=0xAD, term=1)
    assert replaced.is_outranked_by(successor)
    assert replaced.is_outranked_by(successor)
    assert logger.warning.call_count == 1
