"""A served model follows packets of a real store: what is late, damaged, gone or taken back, and what not."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia._native import ParameterServer
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest
from persia.checkpoint.server_job import ServerShare
from persia.embedding.data import IDTypeFeatureWithSingleID, NonIDTypeFeature, PersiaBatch
from persia.errors import FailedPreconditionError, NotFoundError
from persia.logger import get_default_logger
from persia.packets import follower
from persia.packets.follower import Follower, FollowOptions
from persia.packets.log import PacketLog
from persia.packets.packet import BaseKind
from persia.roles.inference import RowCopies
from persia.serving.batcher import Batcher, BatchingOptions
from persia.serving.gate import Gate
from persia.serving.predictor import ModelSettings
from persia.serving.statistics import ServingSource, ServingStatistics
from persia.serving.versions import ServedModel
from persia.storage.dense import state_bytes
from persia.storage.location import Location
from persia.storage.position import Position
from persia.storage.schema import RowSchema
from tests.packet_trainer import IDS, PacketTrainer

WAIT_S = 60.0


def make_batch(ids: Any) -> PersiaBatch:
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("user", np.asarray(ids, np.uint64))],
        [NonIDTypeFeature(np.zeros((len(ids), 1), np.float32))],
        requires_grad=False,
    )


BATCH = make_batch(IDS)


@pytest.fixture
def trainer(tmp_path: Path) -> PacketTrainer:
    made = PacketTrainer(tmp_path / "packets")
    made.trained(1)
    return made


@pytest.fixture
def serve(tmp_path: Path, trainer: PacketTrainer) -> Iterator[Callable[..., ServedModel]]:
    models: list[ServedModel] = []

    def start(*, gate: Gate | None = None, **options: Any) -> ServedModel:
        follow = FollowOptions(
            poll_s=0.02,
            **{
                "num_tries": 3,
                "packets": Location.of(tmp_path / "packets"),
                "checkpoints": Location.of(tmp_path / "model"),
                **options,
            },
        )
        settings = ModelSettings(
            name="m", location=Location.of(tmp_path / "model"), slots=trainer.slots, follow=follow, gate=gate
        )
        models.append(ServedModel(settings))
        return models[-1]

    yield start
    for model in models:
        model.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(get_default_logger(), "propagate", True)  # else pytest does not see records
    return caplog


def wait_until(condition: Callable[[], bool], what: Any = None) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what() if what else "not in time"
        time.sleep(0.01)


def reached(model: ServedModel, position: Position) -> None:
    wait_until(lambda: model.version == str(position), lambda: model.following)


def answer(model: ServedModel, batch: PersiaBatch = BATCH) -> tuple[str, list[float]]:
    prediction = model.predict(batch)
    (outputs,) = prediction.outputs
    return prediction.version, sorted(set(outputs[:, 0].tolist()))


def test_every_answer_is_of_one_packet_while_requests_flow(trainer: PacketTrainer, serve: Any) -> None:
    model = serve()
    number = trainer.position.number
    assert answer(model) == (str(trainer.position), [2.0])
    stop, answers, failures = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            try:
                answers.append(answer(model))
            except Exception as failure:
                failures.append(failure)
            time.sleep(0.002)  # one core must do for the follower, too

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for value in range(2, 22):
            position = trainer.trained(value)
            time.sleep(0.03)
        reached(model, position)
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert failures == []
    stream = trainer.position.stream
    allowed = {f"{stream}/{number + value - 1}": [2.0 * value**2] for value in range(1, 22)}
    assert all(allowed[version] == values for version, values in answers), "rows and model of one packet"
    assert len({version for version, _ in answers}) > 5
    status = model.following
    assert (status.num_applied, status.num_failed, status.num_behind, status.error) == (22, 0, 0, "")
    assert 0.5 <= status.delay_s < 5.0, "the helper says that changes are half a second old"
    assert status.step == position.number


def test_rows_that_were_removed_and_cleared_are_gone(trainer: PacketTrainer, serve: Any) -> None:
    model = serve()
    trainer.clear()
    trainer.set(3.0, IDS[:10])
    reached(model, trainer.write())
    assert answer(model, make_batch(IDS[:10]))[1] == [6.0]
    assert answer(model, make_batch(IDS[10:]))[1] == [0.0]


def test_a_damaged_packet_is_tried_again_until_it_is_repaired(trainer: PacketTrainer, serve: Any) -> None:
    model = serve(num_tries=1000)
    before = trainer.position
    trainer.set(2.0)
    position = trainer.write(2.0, point=False)
    path = trainer.files_of(trainer.last)[0]
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    path.write_bytes(damaged)
    trainer.log.add(trainer.last)
    trainer.trained(3)
    wait_until(lambda: model.following.num_retries > 1)
    assert path.name in model.error
    assert answer(model) == (str(before), [2.0]), "nothing of it is seen"
    path.write_bytes(whole)
    reached(model, position.next)
    wait_until(lambda: model.following.error == "")  # just after the rows are served
    assert model.following.num_failed == 0


@pytest.mark.parametrize("damage", ["manifest", "file", "dense", "gone"])
def test_what_stays_damaged_waits_for_a_newer_checkpoint(
    trainer: PacketTrainer, serve: Any, tmp_path: Path, damage: str, log: pytest.LogCaptureFixture
) -> None:
    model = serve()
    before = trainer.position
    trainer.set(2.0)
    position = trainer.write(2.0, point=False)
    if damage == "manifest":
        trainer.manifest_of(position).write_bytes(trainer.last.encode()[:-20])
    elif damage != "gone":
        files = trainer.files_of(trainer.last)
        path = files[0] if damage == "file" else files[0].with_name("jit_dense.pt")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        trainer.log.add(trainer.last)
    after = trainer.trained(3)
    wait_until(lambda: model.following.num_failed == 1, lambda: model.following)
    time.sleep(0.3)
    assert answer(model) == (str(before), [2.0]), "no gap is jumped over"
    assert f"packet {position} cannot be applied" in model.error
    trainer.checkpoint(tmp_path / "model", 3.0)
    reached(model, after)
    assert answer(model) == (str(after), [18.0])
    reached(model, trainer.trained(4))
    assert answer(model)[1] == [32.0]
    status = model.following
    assert (status.num_failed, status.num_checkpoints, status.error) == (1, 2, "")


def test_bug_9_a_late_packet_is_waited_for(trainer: PacketTrainer, serve: Any) -> None:
    model = serve(num_tries=1000)
    before = trainer.position
    trainer.set(2.0)
    trainer.write(2.0, point=False)
    late = trainer.last
    after = trainer.trained(3)
    wait_until(lambda: model.following.num_retries > 0)
    assert answer(model) == (str(before), [2.0])
    trainer.log._manifest(late.position).replace(late.encode())
    reached(model, after)
    assert answer(model)[1] == [18.0]


def new_training(trainer: PacketTrainer) -> None:
    """One that begins from nothing, with a stream of its own."""
    time.sleep(1.0)  # streams are ordered by the second
    trainer._new_store()
    trainer.begin(BaseKind.NOTHING)


def test_a_training_that_starts_from_nothing_is_held_until_a_pin_takes_it(
    trainer: PacketTrainer, serve: Any, log: pytest.LogCaptureFixture
) -> None:
    model = serve()
    old = trainer.position
    new_training(trainer)
    for value in (5, 6):
        newest = trainer.trained(value)
    wait_until(lambda: model.following.held, lambda: model.following)
    assert f"stream {newest.stream} does not start from what is in use" in model.error
    source = ServingSource(model, ServingStatistics(), 0, 1, Batcher(model.predict, BatchingOptions()))
    assert source.remark().startswith(", held: stream"), "for /readyz"
    assert source.not_ready() is None
    assert answer(model) == (str(old), [2.0])
    assert [r.message.partition(" stays")[0] for r in log.records if r.levelname == "ERROR"] == [
        f"{trainer.log.location}: {old}"
    ]
    # A checkpoint of the new stream removes none of the old one's packets.
    trainer.log.remove_until(Position(newest.stream, 2))
    assert old in trainer.log.positions()
    assert trainer.log.positions(newest.stream) == [newest]
    trainer.checkpoint(Path(str(trainer.log.location)) / "checkpoints" / "step-000000000003", 6.0)
    trainer.pin(newest)
    reached(model, newest)
    trainer.pin(None)
    reached(model, trainer.trained(7))
    assert answer(model)[1] == [98.0]
    wait_until(lambda: not model.following.held and model.error == "", lambda: model.following)


def test_a_training_from_nothing_is_taken_once_it_passes_the_gate(trainer: PacketTrainer, serve: Any) -> None:
    """Its predictions come nearer to those in use: 50, then 2.42, where 2 is served."""
    model = serve(gate=Gate(samples=[BATCH], max_drift=0.5))
    old = trainer.position
    new_training(trainer)
    trainer.set(5.0)
    far = trainer.write(5.0)
    wait_until(lambda: "fails the gate" in model.error, lambda: model.following)
    assert f"{far} fails the gate: its predictions differ from those in use by 48 on average" in model.error
    assert model.following.held
    source = ServingSource(model, ServingStatistics(), 0, 1, Batcher(model.predict, BatchingOptions()))
    assert "--gate-drift 0.5" in source.remark(), "for /readyz and status"
    assert answer(model) == (str(old), [2.0])
    assert old in trainer.log.positions()
    trainer.set(1.1)
    near = trainer.write(1.1)
    reached(model, near)
    wait_until(lambda: not model.following.held and model.error == "", lambda: model.following)
    assert answer(model)[1] == [pytest.approx(2.42)]
    reached(model, trainer.trained(7))  # packets of the stream that is followed are not compared


def test_a_stream_that_fails_the_gate_is_not_loaded_all_the_time(
    trainer: PacketTrainer, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_TRIAL_PAUSES", 1e9)
    model = serve(gate=Gate(samples=[BATCH], max_drift=0.5))
    new_training(trainer)
    trainer.trained(5)
    wait_until(lambda: "fails the gate" in model.error, lambda: model.following)
    held, num_looks = model.following, model._follower._num_failures
    wait_until(lambda: model._follower._num_failures > num_looks + 1)
    assert model.following.num_checkpoints == held.num_checkpoints
    assert model.error == held.error
    trainer.pin(trainer.position)  # a pin needs no gate
    reached(model, trainer.position)


def test_samples_that_the_model_does_not_take_are_refused_at_the_start(serve: Any) -> None:
    users = IDTypeFeatureWithSingleID("user", np.asarray(IDS, np.uint64))
    gate = Gate(samples=[PersiaBatch([users], requires_grad=False)], max_drift=0.5)
    with pytest.raises(FailedPreconditionError, match="the samples of --gate cannot be answered"):
        serve(gate=gate)


def test_a_checkpoint_that_fails_the_gate_is_refused(trainer: PacketTrainer, tmp_path: Path) -> None:
    """Without packets there is no origin: every new version is compared."""
    trainer.checkpoint(tmp_path / "model", 1.0, placed=False)
    settings = ModelSettings(
        name="m",
        location=Location.of(tmp_path / "model"),
        slots=trainer.slots,
        poll_s=0.02,
        gate=Gate(samples=[BATCH], max_drift=0.5),
    )
    model = ServedModel(settings)
    try:
        before = answer(model)
        assert before[1] == [2.0]
        trainer.write(1.0)
        trainer.checkpoint(tmp_path / "model", 3.0, placed=False)
        wait_until(lambda: model.error != "")
        assert "its predictions differ from those in use by 4 on average" in model.error
        assert answer(model) == before
        trainer.write(1.0)
        trainer.checkpoint(tmp_path / "model", 1.2, placed=False)
        wait_until(lambda: model.error == "" and model.version != before[0], lambda: model.error)
        assert answer(model)[1] == [pytest.approx(2.4)]
    finally:
        model.close()


def test_a_stream_that_continues_another_one_by_a_third(
    trainer: PacketTrainer, serve: Any, tmp_path: Path
) -> None:
    """The follower missed the one between them, whose trainer was killed at once."""
    first = trainer.position
    dump_id = trainer.checkpoint(tmp_path / "model", 7.0)
    model = serve()
    between = Position("20990101T000000Z-00000000", 0)
    trainer.position = between
    restart = {"dump_id": dump_id, "factor": 3.0}
    later = Position("20990101T000001Z-00000000", 0)
    packets = []
    for position, origin in ((between, first.stream), (later, between.stream)):
        trainer.position = position
        packets.append(trainer.restart(BaseKind.CHECKPOINT, origin=(origin,), **restart))
    assert trainer.log.lineage(later.stream) == [between.stream, first.stream]
    reached(model, packets[1])
    trainer.log.remove_until(packets[1])
    assert trainer.log.positions() == [], "all of it is in the checkpoint that asked for the removal"


def test_a_new_stream_begins_with_its_checkpoint(trainer: PacketTrainer, serve: Any, tmp_path: Path) -> None:
    model = serve()
    old = trainer.position
    time.sleep(1.0)  # streams are ordered by the second
    trainer._new_store()
    trainer.begin(BaseKind.POSITION, origin=(old.stream,))
    trainer.trained(5)
    wait_until(lambda: "there is no checkpoint" in model.error)
    assert answer(model) == (str(old), [2.0])
    trainer.checkpoint(tmp_path / "packets" / "checkpoints" / "step-000000000002", 5.0)
    reached(model, trainer.trained(6))
    assert answer(model)[1] == [72.0]


def test_a_stream_behind_a_loaded_checkpoint(trainer: PacketTrainer, serve: Any, tmp_path: Path) -> None:
    model = serve()
    dump_id = trainer.checkpoint(tmp_path / "model", 7.0)
    time.sleep(1.0)
    trainer.begin(BaseKind.CHECKPOINT, dump_id=dump_id, origin=(dump_id, trainer.position.stream))
    trainer.set(2.0, IDS[:5])
    reached(model, trainer.write())
    assert answer(model, make_batch(IDS[:5]))[1] == [28.0], "the checkpoint's model, the packet's rows"
    assert answer(model, make_batch(IDS[5:]))[1] == [14.0]


def test_a_restart_within_the_stream(trainer: PacketTrainer, serve: Any, tmp_path: Path) -> None:
    model = serve()
    before = trainer.position
    trainer.set(9.0)  # lost to the packets: tracked changes had no room, say
    trainer.store.take_changes().close()
    trainer.store.track_changes(0)
    trainer.store.track_changes(1000)
    trainer.restart(BaseKind.POSITION)
    wait_until(lambda: "there is no checkpoint" in model.error)
    trainer.write(9.0)
    assert answer(model) == (str(before), [2.0])
    trainer.checkpoint(tmp_path / "model", 9.0)
    reached(model, trainer.position)
    assert answer(model)[1] == [162.0]


def test_back_to_a_pin_and_forward_again(
    trainer: PacketTrainer, serve: Any, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    trainer.checkpoint(tmp_path / "model", 1.0)
    stops = {value: trainer.trained(value) for value in range(2, 9)}
    model = serve()
    assert answer(model) == (str(stops[8]), [128.0])
    trainer.pin(stops[5])
    reached(model, stops[5])
    assert answer(model) == (str(stops[5]), [50.0])
    assert model.following.pinned
    trainer.trained(9)
    time.sleep(0.3)
    assert answer(model) == (str(stops[5]), [50.0]), "it stays there"
    fresh = serve()
    assert answer(fresh) == (str(stops[5]), [50.0]), "a pin holds for who starts later, too"
    trainer.pin(stops[7])
    reached(model, stops[7])
    trainer.pin(None)
    reached(model, trainer.position)
    assert answer(model) == (str(trainer.position), [162.0])
    trainer.pin(Position(trainer.position.stream, 1))
    wait_until(lambda: "has a dense model" in model.error, lambda: model.following)
    assert "name another one there, or remove pin" in model.error
    assert "wait" not in model.error, "what is gone does not come back"
    assert {r.levelname for r in log.records if "cannot be reached" in r.message} == {"ERROR"}
    assert answer(model)[1] == [162.0], "what cannot be gone back to changes nothing"
    (tmp_path / "packets" / "pin").write_text("step 5")
    wait_until(lambda: "which is no packet's name" in model.error)


def test_far_behind_a_checkpoint_is_quicker(trainer: PacketTrainer, serve: Any, tmp_path: Path) -> None:
    model = serve(max_behind=5)
    away = tmp_path / "away"
    (tmp_path / "packets").rename(away)  # the storage is away
    trainer.log = PacketLog(away)
    for value in range(2, 12):
        trainer.trained(value)
    trainer.checkpoint(tmp_path / "model", 11.0)
    away.rename(tmp_path / "packets")
    trainer.log = PacketLog(tmp_path / "packets")
    reached(model, trainer.position)
    status = model.following
    assert (status.num_checkpoints, status.num_applied) == (2, 2), "no packet after the first ones was read"


@pytest.mark.parametrize("damage", ["rows", "model"])
def test_far_behind_packets_do_where_the_checkpoint_does_not(
    trainer: PacketTrainer, serve: Any, tmp_path: Path, damage: str
) -> None:
    model = serve(max_behind=5)
    away = tmp_path / "away"
    (tmp_path / "packets").rename(away)
    trainer.log = PacketLog(away)
    for value in range(2, 12):
        trainer.trained(value)
    newest = tmp_path / "model"
    trainer.checkpoint(newest, 11.0)
    if damage == "rows":
        for file in newest.glob("dump-*/*.emb"):
            file.write_bytes(file.read_bytes()[:-8])
    else:  # it is of another one
        content = state_bytes(torch.nn.Linear(3, 1))
        Checkpoints(list, deadline_s=30).dump(
            DumpRequest(newest, dense={"dense.pt": content}, embeddings=False)
        )
        (newest / "jit_dense.pt").unlink()
    away.rename(tmp_path / "packets")
    trainer.log = PacketLog(tmp_path / "packets")
    reached(model, trainer.position)
    assert answer(model)[1] == [242.0]
    status = model.following
    assert (status.num_checkpoints, status.num_failed, status.error) == (1, 0, "")


def test_storage_that_goes_away_and_comes_back(trainer: PacketTrainer, serve: Any, tmp_path: Path) -> None:
    model = serve()
    packets = tmp_path / "packets"
    packets.rename(tmp_path / "away")
    packets.write_text("no directory")  # reading below it fails
    wait_until(lambda: model.following.num_storage_errors > 0, lambda: model.following)
    assert answer(model)[1] == [2.0]
    packets.unlink()
    (tmp_path / "away").rename(packets)
    reached(model, trainer.trained(2))
    wait_until(lambda: model.error == "", lambda: model.error)  # once the look that brought it is over
    assert model.following.num_failed == 0


def test_tries_of_a_packet_are_its_own(trainer: PacketTrainer, serve: Any, tmp_path: Path) -> None:
    model = serve()
    packets = tmp_path / "packets"
    packets.rename(tmp_path / "away")
    packets.write_text("no directory")
    wait_until(lambda: model.following.num_storage_errors > 2, lambda: model.following)
    trainer.log = PacketLog(tmp_path / "away")
    trainer.set(2.0)
    trainer.manifest_of(trainer.write(2.0, point=False)).write_bytes(b"{}")
    trainer.trained(3)
    packets.unlink()
    (tmp_path / "away").rename(packets)
    wait_until(lambda: model.following.num_failed == 1, lambda: model.following)
    assert model.following.num_retries >= 3, "errors of the storage were none of its tries"


def test_packets_in_an_object_store(tmp_path: Path, serve: Any) -> None:
    trainer = PacketTrainer(f"memory://{tmp_path.name}")
    trainer.trained(1)
    model = serve(packets=trainer.log.location, checkpoints=None)
    for value in range(2, 5):
        position = trainer.trained(value)
    reached(model, position)
    assert answer(model)[1] == [32.0]
    trainer.pin(Position(position.stream, position.number - 1))
    wait_until(lambda: answer(model)[1] == [18.0], lambda: model.following)


def test_a_damaged_checkpoint_leaves_an_older_one(trainer: PacketTrainer, serve: Any, tmp_path: Path) -> None:
    root = tmp_path / "model"
    trainer.checkpoint(root / "step-000000000001", 1.0)
    trainer.trained(2)
    trainer.checkpoint(root / "step-000000000002", 2.0)
    for file in (root / "step-000000000002").glob("dump-*/*.emb"):
        file.write_bytes(file.read_bytes()[:-8])
    model = serve()
    assert answer(model) == (str(trainer.position), [8.0])


def test_without_packets_the_checkpoint_is_served(trainer: PacketTrainer, serve: Any, tmp_path: Path) -> None:
    trainer.checkpoint(tmp_path / "model", 3.0)
    shutil.move(tmp_path / "packets", tmp_path / "later")
    model = serve()
    assert answer(model) == (str(trainer.position.number), [6.0])
    time.sleep(0.2)  # ten times as long as between two looks
    assert "no packets" in model.error
    shutil.move(tmp_path / "later", tmp_path / "packets")
    reached(model, trainer.trained(4))
    assert answer(model)[1] == [32.0]


def test_nothing_to_begin_with_is_said(trainer: PacketTrainer, serve: Any) -> None:
    trainer.pin(Position(trainer.position.stream, 0))
    with pytest.raises(NotFoundError, match="has a dense model"):
        serve()
    trainer.pin(None)
    time.sleep(1.0)
    trainer.begin(BaseKind.POSITION)
    with pytest.raises(NotFoundError, match="is no checkpoint"):
        serve()


def test_weights_alone_go_into_the_script_that_is_known(tmp_path: Path, serve: Any) -> None:
    trainer = PacketTrainer(tmp_path / "weights", scripted=False)
    trainer.trained(1)
    trainer.checkpoint(tmp_path / "model", 1.0)
    model = serve(packets=trainer.log.location)
    reached(model, trainer.trained(3))
    assert answer(model)[1] == [18.0]
    trainer.set(4.0)
    reached(model, trainer.write())
    assert answer(model)[1] == [24.0], "a packet without weights leaves them"
    trainer.checkpoint(tmp_path / "weights" / "checkpoints" / "step-000000000009", 5.0, scripted=False)
    again = serve(packets=trainer.log.location)
    assert answer(again)[1] == [40.0], "rows 4, weights 5: a checkpoint needs no script of its own"


# ---- rows of parameter servers


def make_server(index: int, replicas: int) -> ParameterServer:
    return ParameterServer(
        replica_index=index, replica_size=replicas, capacity=10_000, num_internal_shards=4, read_only=True
    )


def test_bug_9_servers_of_another_number_each_take_their_own(trainer: PacketTrainer, tmp_path: Path) -> None:
    options = FollowOptions(packets=trainer.log.location, poll_s=0.02, num_tries=3)
    trainer.checkpoint(tmp_path / "packets" / "checkpoints" / "step-000000000001", 1.0)
    servers = [make_server(index, 3) for index in range(3)]
    followers = []
    for index, server in enumerate(servers):
        server.start("127.0.0.1", 0)
        share = ServerShare(
            store=server.store, index=index, replicas=3, schema=RowSchema.of(trainer.slots), num_threads=2
        )
        copies = RowCopies(trainer.log, server, share, lambda index=index: make_server(index, 3))
        followers.append(Follower(copies, options))
        followers[-1].start()

    def all_at(position: Position) -> None:
        wait_until(lambda: all(f.status.position == position for f in followers), lambda: followers[0].status)

    def sizes() -> list[int]:
        return [server.stats()["num_rows"] for server in servers]

    try:
        all_at(trainer.position)
        assert sum(sizes()) == len(IDS)
        assert min(sizes()) > 0
        first = trainer.position
        trainer.set(2.0, np.arange(1000, 1200))
        all_at(trainer.write())
        assert sum(sizes()) == len(IDS) + 200
        trainer.pin(first)
        all_at(first)
        assert sum(sizes()) == len(IDS), "what came later is gone again"
        trainer.pin(None)
        all_at(trainer.position)
        assert sum(sizes()) == len(IDS) + 200
    finally:
        for follower in followers:
            follower.close()
