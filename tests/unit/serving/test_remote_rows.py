"""Workers that are down are asked by threads, which end with the rows that they are of."""

from __future__ import annotations

import threading

import pytest

from persia.embedding.data import PersiaBatch
from persia.errors import UnavailableError
from persia.serving.embeddings import RemoteRows
from persia.waiting import Attempts
from tests.ports import free_port
from tests.unit.serving.test_batcher import make_batch


def probes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "persia-probe"]


def test_a_probe_ends_with_its_rows() -> None:
    before = set(probes())
    rows = RemoteRows([f"127.0.0.1:{free_port()}"], deadline_s=2.0)
    batch: PersiaBatch = make_batch([1])
    for _ in range(3):
        with pytest.raises(UnavailableError, match="none of the embedding workers"):
            rows.lookup(batch.encode_id_features())
    (probe,) = set(probes()) - before  # one, however often it was found down
    del rows
    for _ in Attempts(10):
        if not probe.is_alive():
            break
    assert not probe.is_alive()
