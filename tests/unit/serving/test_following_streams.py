"""Where a served model begins, and how it gets from one stream of packets, or checkpoint, to another."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia._native import ParameterServer
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest
from persia.checkpoint.server_job import ServerShare
from persia.errors import NotFoundError
from persia.packets.follower import Follower, FollowOptions
from persia.packets.log import PacketLog
from persia.packets.packet import BaseKind
from persia.roles.inference import RowCopies
from persia.storage.dense import state_bytes
from persia.storage.position import Position
from persia.storage.schema import RowSchema
from tests.following import answer, make_batch, reached, wait_until
from tests.packet_trainer import IDS, PacketTrainer


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
    assert "wait" not in model.error, "waiting brings no lost rows back"
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
