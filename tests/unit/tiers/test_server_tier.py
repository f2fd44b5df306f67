"""Checkpoints whose rows stay in the pools of servers, which may end at any moment.

Servers, pools and files are real; a server that is left without a word keeps what a killed one keeps: nothing
that was not committed. tests/integration/test_tiers.py kills processes.
"""

from __future__ import annotations

import gc
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import _native, pmem
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.coordinator import DumpOperation
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.server_job import ServerShare
from persia.checkpoint.service import CheckpointService
from persia.config import SlotConfig, SlotsConfig, StorageConfig
from persia.embedding.optim import Adagrad
from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.storage.location import Location
from persia.storage.manifest import (
    MANIFEST_NAME,
    EmbeddingSection,
    Manifest,
    ServerEntry,
    make_dump_id,
    utc_now,
)
from persia.storage.schema import RowSchema
from persia.tiers.commit_record import TierCheckpoint
from persia.tiers.server_tier import ServerTier
from tests.unit.checkpoint.conftest import (
    CONFIG,
    SLOTS,
    checkpoints_of,
    edit_manifest,
    make_bags,
    make_server,
    rows_of,
    train,
    without_ages,
)

SCHEMA = RowSchema.of(SLOTS)
KINDS = [
    "file",
    pytest.param("pmem", marks=pytest.mark.skipif(not pmem.HAS_PMEM, reason="built without libpmem")),
]
NUM_ROWS, CACHE_ROWS = 2000, 200


def storage_at(path: Path, kind: str = "file", **options: Any) -> StorageConfig:
    return StorageConfig(kind=kind, path=str(path), **{"cache_rows": CACHE_ROWS, "syncs": False, **options})


def open_pool(
    storage: StorageConfig, index: int = 0, replicas: int = 1, schema: RowSchema | None = SCHEMA
) -> ServerTier:
    return ServerTier(storage, index=index, replicas=replicas, schema=schema, num_threads=2)


class PoolJob:
    """Parameter servers over pools and an embedding worker, all of this process."""

    def __init__(self, storage: StorageConfig, num_servers: int = 2) -> None:
        self.pools = [open_pool(storage, index, num_servers) for index in range(num_servers)]
        self.servers = [
            _native.ParameterServer(
                replica_index=index,
                replica_size=num_servers,
                capacity=1_000_000,
                num_internal_shards=4,
                tier=pool.tier_options,
            )
            for index, pool in enumerate(self.pools)
        ]
        self.worker = _native.EmbeddingWorker(
            slots=SLOTS.native_slots(),
            feature_index_prefix_bit=SLOTS.feature_index_prefix_bit,
            num_servers=num_servers,
        )
        for index, (server, pool) in enumerate(zip(self.servers, self.pools, strict=True)):
            self.worker.set_server(index, f"127.0.0.1:{server.start('127.0.0.1', 0)}")
            pool.attach(server.store)
        self.client = _native.RemoteClient(1)
        self.client.set_worker(0, f"127.0.0.1:{self.worker.start('127.0.0.1', 0)}")
        self.client.configure(Adagrad(lr=0.1).train_config(CONFIG))
        self.peers = [LocalPeer(CheckpointService(share)) for share in self.shares()]
        self.checkpoints = Checkpoints(lambda: self.peers, deadline_s=10)

    def shares(self) -> list[ServerShare]:
        return [
            ServerShare(
                store=server.store,
                index=index,
                replicas=len(self.servers),
                schema=SCHEMA,
                num_threads=2,
                tier=pool,
            )
            for index, (server, pool) in enumerate(zip(self.servers, self.pools, strict=True))
        ]

    def set_rows(self, value: float, num_rows: int = NUM_ROWS) -> None:
        signs = np.arange(1, num_rows + 1, dtype=np.uint64) | np.uint64(1 << 56)
        for begin in range(0, num_rows, 500):
            part = signs[begin : begin + 500]
            self.client.set_embeddings(part, np.full((len(part), 4), value, np.float32))

    def values(self, directory: Path) -> set[float]:
        """Of all elements of all rows, which are as many as were set."""
        self.checkpoints.dump(DumpRequest(directory))
        rows = rows_of(directory)
        assert len(rows) == NUM_ROWS
        # 4 floats of the embedding, then the optimizer's.
        return {float(x) for *_, values in rows for x in np.frombuffer(values, np.float32)[:4]}

    def leave(self) -> None:
        """Without a word to anybody."""
        self.worker.stop(1.0)
        for server in self.servers:
            server.stop(1.0)
        for pool in self.pools:
            pool.close()
        self.__dict__.clear()
        gc.collect()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pools").mkdir()
    return tmp_path / "pools"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_dense_part_go_back_together(kind: str, root: Path, tmp_path: Path) -> None:
    storage = storage_at(root, kind)
    job = PoolJob(storage)
    assert job.pools[0].checkpoint() is None
    job.set_rows(1.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", dense={"dense.pt": b"at 7"}, step=7, in_place=True))
    assert [pool.status()["step"] for pool in job.pools] == [7, 7]
    assert all(pool.stats()["num_hot"] <= CACHE_ROWS for pool in job.pools)
    job.set_rows(2.0)
    assert job.values(tmp_path / "before") == {2.0}
    job.leave()

    job = PoolJob(storage)
    assert [pool.status()["step"] for pool in job.pools] == [7, 7]
    source = Source(tmp_path / "c")
    job.checkpoints.load(source)
    assert (source.manifest.step, source.dense("dense.pt")) == (7, b"at 7")
    assert job.values(tmp_path / "after") == {1.0}
    # The next one takes its place.
    job.set_rows(3.0)
    job.checkpoints.dump(
        DumpRequest(tmp_path / "c", dense={"dense.pt": b"at 9"}, step=9, in_place=True, blocking=False)
    )
    job.set_rows(4.0)
    job.checkpoints.wait_for_dump()
    job.leave()
    job = PoolJob(storage)
    assert job.values(tmp_path / "last") == {3.0}
    job.leave()


def test_a_server_without_an_optimizer_has_nothing_to_keep(root: Path, tmp_path: Path) -> None:
    pool = open_pool(storage_at(root))
    server = make_server(0, 1, tier=pool.tier_options)
    pool.attach(server.store)
    share = ServerShare(store=server.store, index=0, replicas=1, schema=SCHEMA, num_threads=2, tier=pool)
    checkpoints = Checkpoints(lambda: [LocalPeer(CheckpointService(share))], deadline_s=5)
    with pytest.raises(FailedPreconditionError, match="no optimizer yet, and so no rows: a TrainCtx"):
        checkpoints.dump(DumpRequest(tmp_path / "c", in_place=True))
    pool.close()


def prepare(job: PoolJob, directory: Path, step: int) -> Manifest:
    """All that servers do of a dump before they are told that it counts; the manifest that would say so."""
    operation, entries = make_dump_id(), []
    for pool in job.pools:
        number = pool.store.request_checkpoint()
        deadline = time.monotonic() + 120
        while (prepared := pool.store.prepared_checkpoint(number)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        where = str(Location.of(directory))
        pool.prepare(TierCheckpoint(operation=operation, directory=where, step=step, prepared=prepared))
        entries.append(ServerEntry(step=number, num_rows=prepared["num_rows"]))
    section = EmbeddingSection(
        dump_id=operation,
        created_at=utc_now(),
        train_config=None,
        schema=SCHEMA,
        servers=tuple(entries),
        files=(),
        in_place=True,
    )
    return Manifest().updated(step, None, section)


@pytest.mark.parametrize("counts", [True, False])
def test_a_server_that_ends_before_it_is_told_does_what_the_manifest_says(
    counts: bool, root: Path, tmp_path: Path
) -> None:
    storage = storage_at(root)
    job = PoolJob(storage)
    job.set_rows(1.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    job.set_rows(2.0)
    manifest = prepare(job, tmp_path / "c", step=2)
    job.set_rows(3.0)
    if counts:
        (tmp_path / "c" / MANIFEST_NAME).write_bytes(manifest.encode())
        job.pools[0].finish(commit=True)  # one server was told
    job.leave()
    job = PoolJob(storage)
    assert [pool.status()["step"] for pool in job.pools] == ([2, 2] if counts else [1, 1])
    job.checkpoints.load(Source(tmp_path / "c"))
    assert job.values(tmp_path / "after") == {2.0 if counts else 1.0}
    job.leave()


def _of_version(version: int, content: bytes) -> bytes:
    magic = b"PRSAPOOL"
    place = content.index(magic) + len(magic)
    return content.replace(
        content[:place][-8:] + content[place : place + 4], magic + struct.pack("<I", version)
    )


def test_a_tier_file_of_another_version_keeps_what_is_undecided(root: Path, tmp_path: Path) -> None:
    storage = storage_at(root)
    job = PoolJob(storage)
    job.set_rows(1.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    prepare(job, tmp_path / "c", step=2)
    states = [pool.folder / "server.json" for pool in job.pools]
    files = [pool.folder / "rows.pool" for pool in job.pools]
    job.leave()
    undecided = [state.read_bytes() for state in states]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(_of_version(99, content))
    with pytest.raises(FailedPreconditionError, match="version"):
        PoolJob(storage)
    assert [state.read_bytes() for state in states] == undecided
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    PoolJob(storage).leave()  # as the right version decides


def _give_up(job: PoolJob, directory: Path) -> None:
    """A dump that fails when all but its manifest is done."""
    operation = DumpOperation(make_dump_id(), job.peers, 10, request=DumpRequest(directory, in_place=True))
    operation.begin()
    operation.finish()
    operation.give_up()


def test_a_dump_that_is_given_up_leaves_the_one_before(root: Path, tmp_path: Path) -> None:
    storage = storage_at(root)
    job = PoolJob(storage)
    job.set_rows(1.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    job.set_rows(2.0)
    _give_up(job, tmp_path / "c")
    assert [pool.stats()["num_pending"] for pool in job.pools] == [0, 0]
    job.set_rows(3.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=3, in_place=True))
    job.set_rows(4.0)
    _give_up(job, tmp_path / "c")
    job.leave()
    job = PoolJob(storage)
    assert job.values(tmp_path / "after") == {3.0}
    job.leave()


def test_a_coordinator_that_is_gone_leaves_what_the_manifest_says(root: Path, tmp_path: Path) -> None:
    job = PoolJob(storage_at(root))
    job.set_rows(1.0)
    manifest = prepare(job, tmp_path / "c", step=2)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / MANIFEST_NAME).write_bytes(manifest.encode())
    for pool in job.pools:  # what a server does when nobody asks any more
        pool.settle()
    assert [pool.status()["step"] for pool in job.pools] == [2, 2]
    job.leave()


def test_rows_that_were_trained_on_do_not_go_back_without_a_start(root: Path, tmp_path: Path) -> None:
    job = PoolJob(storage_at(root))
    job.set_rows(1.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    job.checkpoints.load(Source(tmp_path / "c"))  # nothing has changed since
    job.set_rows(2.0)
    with pytest.raises(FailedPreconditionError, match=r"trained on since .* start all parameter servers"):
        job.checkpoints.load(Source(tmp_path / "c"))
    job.checkpoints.dump(DumpRequest(tmp_path / "d", step=2, in_place=True))
    with pytest.raises(FailedPreconditionError, match=r"goes back to another checkpoint .*\(step 2\)"):
        job.checkpoints.load(Source(tmp_path / "c"))
    job.leave()


def test_a_full_pool_is_an_error_of_the_dump(root: Path, tmp_path: Path) -> None:
    storage = storage_at(root, size_bytes=32 << 20, cache_rows=300_000)
    job = PoolJob(storage, num_servers=1)
    job.set_rows(1.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", step=1, in_place=True))
    signs = np.arange(1 << 20, (1 << 20) + 250_000, dtype=np.uint64) | np.uint64(1 << 56)
    for begin in range(0, len(signs), 50_000):
        part = signs[begin : begin + 50_000]
        job.client.set_embeddings(part, np.zeros((len(part), 4), np.float32))
    with pytest.raises(ResourceExhaustedError, match="the pool is full: size_bytes is 33554432"):
        job.checkpoints.dump(DumpRequest(tmp_path / "c", step=2, in_place=True))
    job.leave()
    job = PoolJob(storage, num_servers=1)
    job.checkpoints.load(Source(tmp_path / "c"))
    assert job.values(tmp_path / "after") == {1.0}
    job.leave()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_move_between_memory_and_pools_of_other_numbers_of_servers(
    kind: str, root: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    bags = make_bags()
    train(bags)
    checkpoints_of(bags).dump(DumpRequest(checkpoint))
    expected = without_ages(rows_of(checkpoint))
    job = PoolJob(storage_at(root, kind), num_servers=2)
    job.checkpoints.load(Source(checkpoint))
    job.checkpoints.dump(DumpRequest(tmp_path / "pools_of_2"))
    (tmp_path / "other").mkdir()
    job.leave()
    job = PoolJob(storage_at(tmp_path / "other", kind), num_servers=3)
    job.checkpoints.load(Source(tmp_path / "pools_of_2"))
    job.checkpoints.dump(DumpRequest(tmp_path / "c", in_place=True))
    job.leave()
    job = PoolJob(storage_at(tmp_path / "other", kind), num_servers=3)
    job.checkpoints.dump(DumpRequest(tmp_path / "pools_of_3"))
    job.leave()
    memory = checkpoints_of(make_server(0, 2), make_server(1, 2))
    memory.load(Source(tmp_path / "pools_of_3"))
    memory.dump(DumpRequest(tmp_path / "memory"))
    for place in ("pools_of_2", "pools_of_3", "memory"):
        assert np.array_equal(without_ages(rows_of(tmp_path / place)), expected), place


def test_in_place_is_for_pools_and_for_the_servers_that_have_them(root: Path, tmp_path: Path) -> None:
    memory = checkpoints_of(make_server(0, 1))
    with pytest.raises(InvalidArgumentError, match="in memory alone"):
        memory.dump(DumpRequest(tmp_path / "memory", in_place=True))
    job = PoolJob(storage_at(root), num_servers=1)
    job.set_rows(1.0)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", in_place=True))
    with pytest.raises(InvalidArgumentError, match="in memory alone"):
        memory.load(Source(tmp_path / "c"))
    with pytest.raises(FailedPreconditionError, match="in the storage tiers of the servers"):
        rows_of(tmp_path / "c")
    job.leave()


def _refused(storage: StorageConfig, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        open_pool(storage, **options)


def test_whose_pool_it_is(root: Path) -> None:
    storage = storage_at(root)
    _refused(storage_at(root / "missing"), NotFoundError, r"storage\.path=.* is no directory")
    pool = open_pool(storage, 0, 2)
    _refused(storage, UnavailableError, "server-0 is in use by another process", replicas=2)
    pool.close()
    _refused(storage, FailedPreconditionError, "server 0 of 2, and this is server 0 of 3", replicas=3)
    wider = SlotsConfig(slots_config={"user": SlotConfig(dim=16), "item": SlotConfig(dim=8)})
    schema = RowSchema.of(wider)
    _refused(storage, FailedPreconditionError, "slot user had dim 4, group 1", replicas=2, schema=schema)
    open_pool(storage, 0, 2, schema=None).close()
    # With a slot more at the end it goes on, and remembers that.
    more = SlotsConfig(slots_config={**SLOTS.slots_config, "new": SlotConfig(dim=2)})
    open_pool(storage, 0, 2, schema=RowSchema.of(more)).close()
    state = json.loads((root / "server-0" / "server.json").read_text())
    assert list(state["schema"]["slots"]) == ["user", "item", "new"]


@pytest.mark.parametrize(
    "edit",
    [
        {"format": "?"},
        {"version": 3},
        {"checksum": "0" * 64},
        {"replicas": -1},
        {"committed": {"operation": 3}},
        {"prepared": {"operation": "dump", "directory": "/c", "step": 1, "prepared": {"batch": "1"}}},
    ],
)
def test_a_damaged_state_is_refused(edit: dict[str, Any], root: Path) -> None:
    open_pool(storage_at(root)).close()
    path = root / "server-0" / "server.json"
    whole = json.loads(path.read_text())
    del whole["checksum"]  # version 1 had none: what is wrong is the field alone
    path.write_text(json.dumps({**whole, "version": 1, **edit}))
    refused = r"server\.json.* remove the folder .*server-0, and load a checkpoint from files"
    _refused(storage_at(root), CorruptionError, refused)
    path.write_bytes(b"{")
    _refused(storage_at(root), CorruptionError, refused)


def test_rows_in_place_have_no_files(root: Path, tmp_path: Path) -> None:
    job = PoolJob(storage_at(root), num_servers=1)
    job.checkpoints.dump(DumpRequest(tmp_path / "c", in_place=True))
    job.leave()
    file = {"path": f"{make_dump_id()}/x.emb", "num_bytes": 1, "num_rows": 0, "checksum": "00"}
    edit_manifest(tmp_path / "c", lambda values: values["embeddings"]["files"].append(file))
    with pytest.raises(CorruptionError, match="its rows are in place, and it names files"):
        Source(tmp_path / "c")


def test_a_pool_of_nobody_is_not_taken(root: Path) -> None:
    (root / "server-0").mkdir()
    pmem.create(root / "server-0", size_bytes=32 << 20)
    _refused(storage_at(root), FailedPreconditionError, "has a tier file and no server.json")


def test_a_pool_that_has_grown_stays_as_large_as_it_is(root: Path) -> None:
    storage = storage_at(root, size_bytes=64 << 20)
    PoolJob(storage, num_servers=1).leave()
    pmem.grow(root / "server-0", 128 << 20)
    job = PoolJob(storage, num_servers=1)
    assert job.pools[0].stats()["pool_max_bytes"] == 128 << 20
    job.leave()
