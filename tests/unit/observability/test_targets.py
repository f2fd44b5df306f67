"""The file of targets: who leaves it, and who stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from persia.errors import StorageError
from persia.messaging.discovery import Advertiser, ServiceInfo
from persia.messaging.local_session import LocalBroker, LocalSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.observability.targets import TargetsFile, prometheus_targets


def service(index: int, incarnation: int = 1, address: str | None = None, **more: Any) -> ServiceInfo:
    values = {"role": "nn-worker", "replicas": 2, **more}
    return ServiceInfo(
        index=index,
        incarnation=incarnation,
        status_address=f"h:{index}" if address is None else address,
        **values,
    )


def targets_of(path: Path) -> list[str]:
    (group,) = json.loads(path.read_text())
    found: list[str] = group["targets"]
    return found


def test_a_process_without_a_port_is_no_target() -> None:
    assert prometheus_targets([service(1), service(0, address="")]) == [{"targets": ["h:1"]}]


def test_only_a_process_that_ends_in_order_leaves_the_file(tmp_path: Path) -> None:
    broker, path = LocalBroker(), tmp_path / "targets.json"
    session = LocalSession(broker, name="job")
    before, killed = Advertiser(session, service(0)), LocalSession(broker, name="killed")
    before.start()
    targets = TargetsFile(LocalSession(broker, name="status"), str(path))
    Advertiser(killed, service(1)).start()
    targets.write()
    assert targets_of(path) == ["h:0", "h:1"]
    killed.close()  # without a word
    before.stop()
    targets.write()
    assert targets_of(path) == ["h:1"]
    Advertiser(session, service(1, 2, "h:9")).start()
    targets.write()
    assert targets_of(path) == ["h:9"]


@pytest.mark.parametrize("is_heard", [True, False])
def test_servers_of_another_number_leave_the_file_to_those_that_replace_them(
    tmp_path: Path, is_heard: bool
) -> None:
    broker, path = LocalBroker(), tmp_path / "targets.json"
    role = EMBEDDING_PARAMETER_SERVER
    sessions = [LocalSession(broker, name=f"old {index}") for index in range(2)]
    old = [Advertiser(session, service(i, role=role)) for i, session in enumerate(sessions)]
    for advertiser in old:
        advertiser.start()
    targets = TargetsFile(LocalSession(broker, name="status"), str(path))
    targets.write()
    assert targets_of(path) == ["h:0", "h:1"]
    new = service(0, 3, "h:9", role=role, replicas=1, generation=1)
    Advertiser(LocalSession(broker, name="new"), new).start()
    for advertiser, session in zip(old, sessions, strict=True):
        if is_heard:
            advertiser.stop()
        session.close()
    targets.write()
    assert targets_of(path) == ["h:9"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    targets = TargetsFile(LocalSession(LocalBroker(), name="status"), str(tmp_path / "no" / "t.json"))
    with pytest.raises(StorageError, match=r"no/t\.json"):
        targets.write()
