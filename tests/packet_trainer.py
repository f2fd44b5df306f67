"""A training in this process that writes packets one by one, so that tests decide what followers find."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, List  # noqa: UP035 - torch.jit.script resolves typing.List

import numpy as np
import torch

from persia._native import EmbeddedClient, TrainConfig
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.server_job import ServerShare
from persia.checkpoint.service import CheckpointService
from persia.config import SlotsConfig, parse_embedding_config
from persia.packets.log import PacketLog
from persia.packets.packet import Base, BaseKind, Packet
from persia.pipeline.slot_rows import slot_signs
from persia.storage.dense import state_bytes
from persia.storage.manifest import MANIFEST_NAME, FileEntry, Manifest, ServerEntry
from persia.storage.position import Position, make_stream_id
from persia.storage.schema import RowSchema
from persia.storage.shard_file import write_shard_file

SLOTS = {"slots_config": {"user": {"dim": 2}}}
IDS = np.arange(10, 60, dtype=np.uint64)


class Model(torch.nn.Module):
    """`factor` times the sum of a sample's row, plus its dense value."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        return self.factor * embeddings[0].sum(dim=1, keepdim=True) + torch.nn.functional.linear(
            dense[0], torch.ones(1, 1)
        )


def script(factor: float) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Model(factor)), buffer)
    return buffer.getvalue()


class PacketTrainer:
    """Every ID's row is [value, value] after `set(value)`."""

    def __init__(self, folder: Path | str, *, num_files: int = 2, scripted: bool = True) -> None:
        """`scripted`: packets have TorchScript; else weights alone."""
        self.log = PacketLog(folder)
        self.slots: SlotsConfig = parse_embedding_config(SLOTS)
        self._num_files = num_files
        self._dense_name = "jit_dense.pt" if scripted else "dense.pt"
        self._new_store()
        self.begin(BaseKind.NOTHING)

    def _new_store(self) -> None:
        self.client = EmbeddedClient(
            slots=self.slots.native_slots(),
            feature_index_prefix_bit=self.slots.feature_index_prefix_bit,
        )
        self.client.configure(TrainConfig(optimizer="adagrad", lr=0.1))
        self.store = self.client.store
        self.store.track_changes(1000)

    def begin(self, kind: BaseKind, **options: Any) -> Position:
        """A stream of its own. `options`: those of `restart`."""
        self.position = Position(make_stream_id(), 0)
        return self.restart(kind, **options)

    def restart(
        self,
        kind: BaseKind,
        *,
        dump_id: str | None = None,
        factor: float | None = None,
        origin: tuple[str, ...] = (),
    ) -> Position:
        now = time.time()
        self.position = self.position.next
        dense = self._dense(factor)
        base = Base(kind=kind, reason="a test", dump_id=dump_id, origin=origin)
        self.log.add(Packet(position=self.position, changed_after=now, cut_at=now, base=base, dense=dense))
        return self.position

    def set(self, value: float, ids: Any = IDS) -> None:
        signs = slot_signs(self.slots, "user", np.asarray(ids, np.uint64))
        self.client.set_embeddings(signs, np.full((len(signs), 2), value, np.float32))

    def clear(self) -> None:
        self.client.clear()

    def write(self, factor: float | None = None, *, point: bool = True) -> Position:
        """What has changed since the packet before, with a dense model of that factor; its position."""
        self.position = self.position.next
        folder = self.position.make_folder()
        changes = self.store.take_changes(self._num_files)
        files = [
            write_shard_file(
                changes.part(i), self.log.files, f"{folder}/embeddings-0-{i}.emb", lambda _: None
            )
            for i in range(self._num_files)
        ]
        changes.commit()
        config = changes.train_config
        assert config is not None
        packet = Packet(
            position=self.position,
            changed_after=time.time() - 0.5,
            cut_at=time.time(),
            step=self.position.number,
            is_from_nothing=changes.is_from_nothing,
            train_config=config.encode().hex(),
            schema=RowSchema.of(self.slots),
            servers=(ServerEntry(step=1, num_rows=sum(file.num_rows for file in files)),),
            files=tuple(files),
            dense=self._dense(factor, folder),
        )
        changes.close()
        if point:
            self.log.add(packet)
        self.last = packet
        return self.position

    def trained(self, value: int) -> Position:
        """All rows and the model are `value` from this packet on: a prediction is 2 * value ** 2."""
        self.set(float(value))
        return self.write(float(value))

    def checkpoint(
        self, directory: Path, factor: float, *, placed: bool = True, scripted: bool = True
    ) -> str:
        """A whole one, with all packets so far in it; the dump's id."""
        share = ServerShare(
            store=self.store, index=0, replicas=1, schema=RowSchema.of(self.slots), num_threads=2
        )
        peer = LocalPeer(CheckpointService(share))
        step = self.position.number
        Checkpoints(lambda: [peer], deadline_s=30).dump(
            DumpRequest(directory, dense={"jit_dense.pt": script(factor)}, step=step)
        )
        manifest = Manifest.read(self.log.location.of(directory))[0]
        assert manifest.embeddings is not None
        if placed:
            embeddings = replace(manifest.embeddings, packets=self.position)
            (directory / MANIFEST_NAME).write_bytes(replace(manifest, embeddings=embeddings).encode())
        return manifest.embeddings.dump_id

    def pin(self, position: Position | None) -> None:
        path = self.log.location / "pin"
        if position is None:
            path.remove()
        else:
            path.replace(f"{position.name}\n".encode())

    def manifest_of(self, position: Position) -> Path:
        return Path(str(self.log.location)) / "manifests" / f"{position.name}.json"

    def files_of(self, packet: Packet) -> list[Path]:
        return [Path(str(self.log.files)) / file.path for file in packet.files]

    def _dense(self, factor: float | None, folder: str | None = None) -> Mapping[str, FileEntry]:
        if factor is None:
            return {}
        name = self._dense_name
        path = f"{folder or self.position.make_folder()}/{name}"
        content = script(factor) if name == "jit_dense.pt" else state_bytes(Model(factor))
        with (self.log.files / path).create() as sink:
            sink.write(content)
        checksum = hashlib.sha256(content).hexdigest()
        return {name: FileEntry(path=path, num_bytes=len(content), checksum=checksum, num_rows=0)}
