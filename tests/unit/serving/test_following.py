"""A served model follows packets of a real store: what is late, damaged, gone or taken back, and what not."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.errors import FailedPreconditionError
from persia.packets import follower
from persia.packets.packet import BaseKind
from persia.serving.batcher import Batcher, BatchingOptions
from persia.serving.gate import Gate
from persia.serving.inference import Inference
from persia.serving.models import Models, ServingSource
from persia.serving.predictor import ModelSettings
from persia.serving.statistics import ServingStatistics
from persia.serving.versions import ServedModel
from persia.storage.location import Location
from persia.storage.position import Position
from tests.following import BATCH, answer, make_batch, reached, wait_until
from tests.packet_trainer import IDS, PacketTrainer


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
            if value % 3 == 0:  # a busy machine applies several at once, and asks in between
                at = str(position)
                wait_until(lambda at=at: any(version == at for version, _ in answers) or failures != [])
        reached(model, position)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert failures == []
    stream = trainer.position.stream
    allowed = {f"{stream}/{number + value - 1}": [2.0 * value**2] for value in range(1, 22)}
    assert all(allowed[version] == values for version, values in answers), "rows and model of one packet"
    assert len({version for version, _ in answers}) > 5
    status = model.following
    assert (status.num_applied, status.num_failed, status.num_behind, status.error) == (22, 0, 0, "")
    assert 0.5 <= status.delay_s < 60.0, "the helper says that changes are half a second old"
    assert status.step == position.number


def test_a_packet_in_a_local_directory_is_not_waited_for(trainer: PacketTrainer, serve: Any) -> None:
    model = serve(poll_s=3600.0)
    for value in (2, 3):
        reached(model, trainer.trained(value))
    assert answer(model)[1] == [2.0 * 3**2]


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


def source_of(model: Any) -> ServingSource:
    """What shows a server of this model alone."""
    batcher = Batcher(model.predict, BatchingOptions())
    return ServingSource(Models.of([Inference(model, batcher, ServingStatistics(), 60.0)]), 0, 1)


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
    source = source_of(model)
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
    source = source_of(model)
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
