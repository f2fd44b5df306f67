"""Dumps and loads of real stores: equal to the last bit, atomic, and checked before anything is replaced."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.config import SlotConfig, SlotsConfig
from persia.embedding.optim import SGD, Adagrad, Optimizer
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PersiaError,
    ResourceExhaustedError,
    StorageError,
    UnavailableError,
)
from persia.storage.location import Location
from persia.storage.manifest import Manifest, make_dump_id
from persia.storage.schema import RowSchema

from .conftest import (
    CONFIG,
    SLOTS,
    checkpoints_of,
    make_bags,
    make_server,
    rows_of,
    services,
    shard_files,
    train,
    unchanged,
    without_ages,
)


def config_bytes(optimizer: Optimizer) -> bytes:
    return optimizer.train_config(CONFIG).encode()


@pytest.mark.parametrize("url", ["{tmp}", "memory://{tmp}"])
def test_any_number_of_servers_holds_the_same_rows(url: str, tmp_path: Path, optimizer: Optimizer) -> None:
    place = url.format(tmp=tmp_path)
    bags = make_bags(optimizer)
    train(bags)
    checkpoints_of(bags).dump(DumpRequest(f"{place}/1", step=3))
    expected = rows_of(f"{place}/1")
    assert len(expected) > 4000
    last = f"{place}/1"
    for num_servers in (3, 2, 1):
        servers = checkpoints_of(*(make_server(index, num_servers) for index in range(num_servers)))
        servers.load(Source(last))
        last = f"{place}/on{num_servers}"
        servers.dump(DumpRequest(last))
        manifest, _ = Manifest.read(Location.of(last))
        assert manifest.embeddings is not None
        assert len(manifest.embeddings.servers) == num_servers
        assert min(server.num_rows for server in manifest.embeddings.servers) > 0
        assert np.array_equal(without_ages(rows_of(last)), without_ages(expected))
    # And training goes on as if nothing had happened.
    again = make_bags(optimizer)
    checkpoints_of(again).load(Source(last), train_config=config_bytes(optimizer))
    for store in (bags, again):
        train(store, seed=1)
    checkpoints_of(bags).dump(DumpRequest(f"{place}/went_on"))
    checkpoints_of(again).dump(DumpRequest(f"{place}/resumed"))
    assert np.array_equal(
        without_ages(rows_of(f"{place}/went_on")), without_ages(rows_of(f"{place}/resumed"))
    )


def test_the_order_of_eviction_is_kept(tmp_path: Path) -> None:
    bags = make_bags()
    for first in (0, 1000, 2000):
        ids = np.arange(first, first + 1000, dtype=np.uint64)
        bags.lookup(np.concatenate([ids, ids]), np.ones((2, 1000), np.int64), train=True)
    checkpoints_of(bags).dump(DumpRequest(tmp_path / "c"))
    small = make_bags(capacity=2400)
    checkpoints_of(small).load(Source(tmp_path / "c"))
    checkpoints_of(small).dump(DumpRequest(tmp_path / "small"))
    kept = np.array([sign for sign, *_ in rows_of(tmp_path / "small")], dtype=np.uint64) & np.uint64(
        2**56 - 1
    )
    assert len(kept) == 2400
    # Of 6,000 rows the 2,000 used last, and none of the 2,000 used first, but for uneven shards.
    assert np.count_nonzero(kept >= 2000) > 1900
    assert np.count_nonzero(kept < 1000) < 50


def test_ages_survive_other_numbers_of_servers(tmp_path: Path) -> None:
    bags = make_bags()
    for first in (0, 1000, 2000):
        ids = np.arange(first, first + 1000, dtype=np.uint64)
        bags.lookup(np.concatenate([ids, ids]), np.ones((2, 1000), np.int64), train=True)
    checkpoints_of(bags).dump(DumpRequest(tmp_path / "1"))
    servers = checkpoints_of(*(make_server(index, 3) for index in range(3)))
    servers.load(Source(tmp_path / "1"))
    servers.dump(DumpRequest(tmp_path / "3"))
    before, after = rows_of(tmp_path / "1"), rows_of(tmp_path / "3")
    for old_age in np.unique(before[:, 1].astype(int)):
        ages = after[before[:, 1].astype(int) == old_age, 1].astype(int)
        younger = after[before[:, 1].astype(int) < old_age, 1].astype(int)
        assert younger.size == 0 or younger.max() < ages.min()


def test_a_dump_replaces_what_was_there(checkpoint: Path) -> None:
    before = shard_files(checkpoint)
    bags = make_bags()
    train(bags, seed=9)
    checkpoints_of(bags).dump(DumpRequest(checkpoint, dense={"dense.pt": b"newer"}, step=6))
    after = shard_files(checkpoint)
    assert after
    assert not set(before) & set(after)
    assert not [path for path in before if path.exists()]
    assert Source(checkpoint).manifest.step == 6
    assert (checkpoint / "dense.pt").read_bytes() == b"newer" == Source(checkpoint).dense("dense.pt")
    assert sorted(path.name for path in checkpoint.iterdir() if not path.name.startswith("dump-")) == [
        "dense.pt",
        "manifest.json",
    ]


def test_a_dump_of_one_part_leaves_the_other(checkpoint: Path) -> None:
    rows = rows_of(checkpoint)
    checkpoints_of(make_bags()).dump(DumpRequest(checkpoint, dense={"dense.pt": b"only"}, embeddings=False))
    assert np.array_equal(rows_of(checkpoint), rows)
    assert Source(checkpoint).dense("dense.pt") == b"only"
    checkpoints_of(make_bags()).dump(DumpRequest(checkpoint))
    assert Source(checkpoint).dense("dense.pt") == b"only"
    assert len(rows_of(checkpoint)) == 0
    named = {file.split("/")[0] for file in Source(checkpoint).manifest.paths}
    assert {path.name for path in checkpoint.glob("dump-*")} == named


def test_leftovers_of_a_dump_that_was_killed_go_with_the_next(checkpoint: Path) -> None:
    leftover = checkpoint / "dump-20200101T000000Z-00000000"
    leftover.mkdir()
    (leftover / "embeddings-0-0.emb").write_bytes(b"half")
    checkpoints_of(make_bags()).dump(DumpRequest(checkpoint))
    assert not leftover.exists()


def test_keep_last(tmp_path: Path) -> None:
    bags = make_bags()
    checkpoints = checkpoints_of(bags)
    for step in (1, 2, 3):
        train(bags, num_ids=100, seed=step)
        checkpoints.dump(DumpRequest(tmp_path, step=step, keep_last=2))
    assert Source(tmp_path).manifest.step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-000000000002",
        "step-000000000003",
    ]
    with pytest.raises(InvalidArgumentError, match="keep_last=0"):
        checkpoints.dump(DumpRequest(tmp_path, step=4, keep_last=0))
    with pytest.raises(InvalidArgumentError, match="keep_last needs the step"):
        checkpoints.dump(DumpRequest(tmp_path, keep_last=1))


def test_training_goes_on_behind_a_dump_and_is_not_in_it(tmp_path: Path) -> None:
    bags = make_bags()
    train(bags)
    checkpoints = checkpoints_of(bags)
    checkpoints.dump(DumpRequest(tmp_path / "before"))
    checkpoints.dump(DumpRequest(tmp_path / "behind", blocking=False))
    train(bags, seed=1)
    checkpoints.wait_for_dump()
    checkpoints.wait_for_dump()
    checkpoints.dump(DumpRequest(tmp_path / "after"))
    before, behind, after = (without_ages(rows_of(tmp_path / name)) for name in ("before", "behind", "after"))
    assert np.array_equal(before, behind)
    assert not np.array_equal(before, after)


def test_an_error_behind_training_is_raised_once_by_the_wait(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_bytes(b"")
    checkpoints = checkpoints_of(make_bags())
    checkpoints.dump(DumpRequest(blocker / "c", blocking=False))
    with pytest.raises(StorageError, match="could not be written"):
        checkpoints.wait_for_dump()
    checkpoints.wait_for_dump()
    checkpoints.dump(DumpRequest(tmp_path / "c"))


USER, ITEM = (SLOTS.slots_config[name] for name in ("user", "item"))
TAG = SlotConfig(dim=2)


@pytest.mark.parametrize(
    ("now", "changes"),
    [
        ({"user": USER, "item": ITEM, "tag": TAG}, "slots added tag"),
        ({"user": USER}, "slots removed item"),
    ],
)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_slots_added_and_removed_are_reported_and_loaded_only_when_accepted(
    now: dict[str, SlotConfig],
    changes: str,
    num_servers: int,
    checkpoint: Path,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:
    schema = RowSchema.of(SlotsConfig(slots_config=now))
    stores = [make_server(index, num_servers) for index in range(num_servers)]
    checkpoints = checkpoints_of(*stores, schema=schema)
    bags = make_bags()
    train(bags, num_ids=100)
    checkpoints_of(bags, schema=schema).dump(DumpRequest(tmp_path / "own"))
    checkpoints.load(Source(tmp_path / "own"))
    with (
        unchanged(checkpoints, tmp_path),
        pytest.raises(
            FailedPreconditionError, match=f"{changes} since {checkpoint} was written: .*strict=False"
        ),
    ):
        checkpoints.load(Source(checkpoint))
    log.clear()
    checkpoints.load(Source(checkpoint), strict=False)
    (warning,) = (record.message for record in log.records if record.levelname == "WARNING")
    assert warning.startswith(f"{changes} since {checkpoint} was written: added slots begin empty")
    checkpoints.dump(DumpRequest(tmp_path / "after"))
    assert np.array_equal(without_ages(rows_of(tmp_path / "after")), without_ages(rows_of(checkpoint))), (
        "rows of removed slots stay; added ones have none"
    )
    checkpoints.load(Source(tmp_path / "after"))  # the slots are its own now


def test_slots_whose_rows_would_mean_others_are_refused(checkpoint: Path) -> None:
    other = SlotsConfig(slots_config={"user": SlotConfig(dim=8), "item": SlotConfig(dim=8)})
    moved = SlotsConfig(slots_config={"user": USER, "tag": TAG, "item": ITEM})
    for schema, slot in ((other, "user"), (moved, "item")):
        checkpoints = checkpoints_of(make_bags(), schema=RowSchema.of(schema))
        with pytest.raises(FailedPreconditionError, match=f"slot {slot} had dim .* keep what it had"):
            checkpoints.load(Source(checkpoint), strict=False)


def test_another_kind_of_optimizer_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    bags = make_bags(SGD(lr=0.1))
    train(bags, num_ids=50)
    checkpoints = checkpoints_of(bags)
    with unchanged(checkpoints, tmp_path), pytest.raises(PersiaError, match=r"(?i)adagrad|optimizer|state"):
        checkpoints.load(Source(checkpoint), train_config=config_bytes(SGD(lr=0.1)))


def test_hyper_parameters_of_the_script_win(checkpoint: Path, tmp_path: Path) -> None:
    """Training goes on with the learning rate that it is given, not with the checkpoint's."""
    results = []
    for lr in (0.1, 0.001):
        bags = make_bags(Adagrad(lr=lr))
        checkpoints = checkpoints_of(bags)
        checkpoints.load(Source(checkpoint), train_config=config_bytes(Adagrad(lr=lr)))
        train(bags, steps=1, seed=5)
        checkpoints.dump(DumpRequest(tmp_path / str(lr)))
        results.append(rows_of(tmp_path / str(lr)))
    assert not np.array_equal(results[0], results[1])


def test_the_old_checkpoint_is_readable_while_a_new_one_is_written(checkpoint: Path) -> None:
    was_read = threading.Event()

    class WaitingPeer(LocalPeer):
        """Does not tell that its rows are written before the old ones were read: the dump cannot end."""

        def call(self, request: Request, timeout_s: float) -> Report:
            assert request.verb is not Verb.POLL or was_read.wait(120)
            return super().call(request, timeout_s)

    expected = rows_of(checkpoint)
    bags = make_bags()
    train(bags, num_ids=20_000)
    peers = [WaitingPeer(service) for service in services([bags])]
    checkpoints = Checkpoints(lambda: peers, deadline_s=60)
    checkpoints.dump(DumpRequest(checkpoint, blocking=False))
    try:
        assert np.array_equal(rows_of(checkpoint), expected)
    finally:
        was_read.set()
    while checkpoints._result is not None and not checkpoints._result.done():
        try:
            num_rows = len(rows_of(checkpoint))
        except NotFoundError:
            break  # the new one is complete, and the old files have gone meanwhile
        assert num_rows == len(expected) or num_rows > 10_000
    checkpoints.wait_for_dump()
    assert len(rows_of(checkpoint)) > 10_000


class SilentPeer(LocalPeer):
    """Reaches its server until it is told to be silent."""

    silent = False

    def call(self, request: Request, timeout_s: float) -> Report:
        if self.silent:
            raise UnavailableError("nobody listens")
        return super().call(request, timeout_s)


def test_a_server_that_falls_silent_is_named_and_nothing_is_left(checkpoint: Path) -> None:
    expected = rows_of(checkpoint)
    peers = [SilentPeer(service) for service in services([make_bags() for _ in range(2)])]
    checkpoints = Checkpoints(lambda: peers, deadline_s=0.5)
    peers[1].silent = True
    with pytest.raises(
        UnavailableError, match="the store of this process has not answered for 0.5 s during dump-"
    ):
        checkpoints.dump(DumpRequest(checkpoint))
    assert np.array_equal(rows_of(checkpoint), expected)
    assert len(list(checkpoint.glob("dump-*"))) == 1


def test_a_server_that_has_restarted_is_named(tmp_path: Path) -> None:
    class Restarting(LocalPeer):
        def call(self, request: Request, timeout_s: float) -> Report:
            if request.verb is Verb.POLL:
                self._service.close()  # what has ended writes no more
                (self._service,) = services([make_bags()])
            return super().call(request, timeout_s)

    (service,) = services([make_bags()])
    checkpoints = Checkpoints(lambda: [Restarting(service)], deadline_s=5)
    with pytest.raises(UnavailableError, match="has restarted during dump-"):
        checkpoints.dump(DumpRequest(tmp_path / "c"))
    assert not list((tmp_path / "c").glob("*"))


def test_an_abandoned_operation_ends_by_itself(checkpoint: Path, tmp_path: Path) -> None:
    """Its coordinator was killed: the server gives up what it holds, and takes the next operation."""
    store = make_bags()
    (service,) = services([store], lease_s=3.0)  # longer than a busy machine keeps this thread
    manifest = Source(checkpoint).manifest
    _, digest = Manifest.read(Location.of(checkpoint))
    assert manifest.embeddings is not None
    load = Request(
        verb=Verb.LOAD,
        operation="load-1",
        arguments={
            "directory": str(checkpoint),
            "manifest": digest,
            "train_config": manifest.embeddings.train_config,
        },
    )
    assert service.answer(load).state in (State.RUNNING, State.CHECKED)
    other = Request(verb=Verb.DUMP, operation=make_dump_id(), arguments={"directory": str(tmp_path / "d")})
    with pytest.raises(ResourceExhaustedError, match="busy with load-1"):
        service.answer(other)
    deadline = time.monotonic() + 120
    while True:
        try:
            service.answer(other)
            break
        except ResourceExhaustedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    service.close()


def test_a_repeated_request_begins_nothing_new(tmp_path: Path) -> None:
    (service,) = services([make_bags()])
    dump = Request(verb=Verb.DUMP, operation=make_dump_id(), arguments={"directory": str(tmp_path)})
    service.answer(dump)
    poll = Request(verb=Verb.POLL, operation=dump.operation)
    deadline = time.monotonic() + 120
    while (report := service.answer(poll)).state is State.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert report.state is State.DONE
    assert service.answer(dump) == report
    with pytest.raises(InvalidArgumentError, match="not the name of a dump"):
        service.answer(Request(verb=Verb.DUMP, operation="../x", arguments={"directory": str(tmp_path)}))


@pytest.mark.parametrize(("lease_s", "remembered"), [(600.0, True), (3.0, False)])
def test_operations_that_ended_are_remembered_for_their_lease(
    tmp_path: Path, lease_s: float, remembered: bool
) -> None:
    (service,) = services([make_bags()], lease_s=lease_s)

    def dump() -> tuple[Request, Report]:
        begin = Request(verb=Verb.DUMP, operation=make_dump_id(), arguments={"directory": str(tmp_path)})
        poll = Request(verb=Verb.POLL, operation=begin.operation)
        service.answer(begin)
        deadline = time.monotonic() + 120
        while (report := service.answer(poll)).state is State.RUNNING:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return poll, report

    poll, report = dump()
    if remembered:
        dump()
        assert service.answer(poll) == report
    else:
        time.sleep(lease_s + 0.1)
        dump()
        with pytest.raises(NotFoundError, match=f"knows no operation {poll.operation}"):
            service.answer(poll)


def test_no_progress_is_an_error(tmp_path: Path) -> None:
    """A disk that hangs: the coordinator names who is not done, and does not wait for ever."""
    hang = threading.Event()

    class Hanging(LocalPeer):
        def call(self, request: Request, timeout_s: float) -> Report:
            if request.verb is Verb.POLL and not hang.is_set():
                return Report(state=State.RUNNING, done_bytes=5)
            return super().call(request, timeout_s)

    (service,) = services([make_bags()])
    checkpoints = Checkpoints(lambda: [Hanging(service)], deadline_s=0.3)
    with pytest.raises(DeadlineExceededError, match="no byte was moved for 0.3 s .*not done: the store"):
        checkpoints.dump(DumpRequest(tmp_path / "c"))


def test_a_server_without_an_optimizer_has_nothing_to_dump(tmp_path: Path) -> None:
    server = make_server(0, 1)
    checkpoints = Checkpoints(lambda: [LocalPeer(service) for service in services([server])], deadline_s=5)
    with pytest.raises(FailedPreconditionError, match="no optimizer yet, and so no rows: a TrainCtx"):
        checkpoints.dump(DumpRequest(tmp_path / "c"))
    assert not list(tmp_path.glob("c/*"))


def test_manifest_says_what_it_holds(checkpoint: Path) -> None:
    values = json.loads((checkpoint / "manifest.json").read_text())
    assert values["step"] == 5
    assert values["created_by"].startswith("persia ")
    assert values["embeddings"]["num_virtual_shards"] == 4096
    assert set(values["embeddings"]["schema"]["slots"]) == {"user", "item"}
    for file in [*values["embeddings"]["files"], *values["dense"]["files"].values()]:
        assert (checkpoint / file["path"]).stat().st_size == file["num_bytes"]
