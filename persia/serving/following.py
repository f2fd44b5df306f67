"""A served model that follows its training: rows and dense model switch together, between two batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from persia.checkpoint.checkpoints import Source
from persia.errors import CorruptionError, FailedPreconditionError, NotFoundError, UnavailableError
from persia.observability.status import fetch_json
from persia.packets.log import PacketLog
from persia.packets.packet import Packet
from persia.serving.embeddings import EmbeddedRows, EmbeddingSource
from persia.serving.predictor import (
    ModelSettings,
    Predictor,
    Version,
    embeddings_of,
    load_version,
    try_sample,
)
from persia.serving.scripts import JIT_DENSE_NAME, load_script, read_own, read_script
from persia.storage.dense import load_state
from persia.storage.location import Location
from persia.storage.position import Position
from persia.storage.signature import Signature
from persia.waiting import Attempts

_STATE_NAME = "dense.pt"
_SERVERS_S = 5.0  # for parameter servers to apply a packet that this process has seen


class Switch(Protocol):
    """Puts a version in the place of the one that answers."""

    def __call__(self, version: Version, change_rows: Callable[[], None]) -> None:
        """No batch sees rows and model of different versions."""


class ServedCopies:
    """Copies of a model for a Follower. With remote rows the model alone: servers follow by themselves."""

    def __init__(self, settings: ModelSettings, switch: Switch) -> None:
        assert settings.follow is not None, "there is something to follow"
        self._settings = settings
        self._switch = switch
        self._log = PacketLog(settings.follow.packets)
        self._models = DenseModels(settings.location)

    def load(self, checkpoint: Source | None) -> ServedCopy:
        """NotFoundError: the checkpoint has no dense model, or there is no TorchScript for it."""
        if checkpoint is None:
            rows = embeddings_of(self._settings, None)
            return ServedCopy(self._settings, self._log, self._models, rows, None)
        version = load_version(self._settings, checkpoint, self._models.of_checkpoint)
        return ServedCopy(self._settings, self._log, self._models, version.predictor.embeddings, version)

    def use(self, copy: ServedCopy, position: Position | None) -> ServedCopy:
        if copy.version is None:
            raise NotFoundError(f"no packet in {self._log.location} up to {position} has a dense model")
        # Named by the packet and not by its checkpoint, so that clients and status see it move.
        if position is not None:
            copy.version = replace(copy.version, name=str(position))
        self._switch(copy.version, _nothing)
        copy.switch = self._switch
        return copy


@dataclass(eq=False)
class ServedCopy:
    """One version, brought forward by packets."""

    settings: ModelSettings
    log: PacketLog
    models: DenseModels
    embeddings: EmbeddingSource
    version: Version | None  # None: no packet has had a dense model yet
    switch: Switch | None = None  # given to the copy that answers

    def prepare(self, packet: Packet) -> Callable[[], None]:
        # Everything that takes time is prepared here; `apply` runs while lookups wait.
        # The model first: rows are not prepared in vain for a packet whose model cannot be used.
        predictor = self._predictor_at(packet)
        change_rows = _nothing
        if isinstance(self.embeddings, EmbeddedRows):
            change_rows = self.embeddings.packets.prepare(self.log.files, packet)
        elif packet.dense:
            _await_servers(self.settings.servers, packet.position)
        version = None if predictor is None else Version(str(packet.position), "", predictor)

        def apply() -> None:
            if self.switch is None or version is None:
                change_rows()
            else:
                self.switch(version, change_rows)
            self.version = version

        return apply

    def _predictor_at(self, packet: Packet) -> Predictor | None:
        """With the packet's model, or the one from before; None: there has been none."""
        model = self.models.of_packet(self.log, packet)
        if model is None:
            return None if self.version is None else self.version.predictor
        predictor = self.settings.predictor(model, self.embeddings, self.models.signature)
        try_sample(self.settings, predictor)
        return predictor


class DenseModels:
    """A model is TorchScript with its weights. Packets mostly have new weights alone, as a state_dict: they
    go into the script that was seen last, or else that of `location`. Each call makes a model of its own.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._script: tuple[bytes, str] | None = None  # and where it was found
        self.signature: Signature | None = None  # of the model that was made last

    def of_checkpoint(self, source: Source) -> torch.nn.Module:
        """NotFoundError: there is no dense model, or no script for it; CorruptionError."""
        self.signature = source.signature
        try:
            content = source.dense(JIT_DENSE_NAME, read_own)
        except NotFoundError:
            try:
                state = source.dense(_STATE_NAME)
            except NotFoundError:
                return load_script(source)  # says what is missing, and how to write it
            return self._with_state(state, str(source.location / _STATE_NAME))
        return self._with_script(content, str(source.location / JIT_DENSE_NAME))

    def of_packet(self, log: PacketLog, packet: Packet) -> torch.nn.Module | None:
        """None: the packet has none, and the one before stays. CorruptionError, NotFoundError name the file;
        FailedPreconditionError: it does not fit the script.
        """
        for name, read in ((JIT_DENSE_NAME, self._with_script), (_STATE_NAME, self._with_state)):
            entry = packet.dense.get(name)
            if entry is None:
                continue
            # A packet of an older version does not tell, but its model has the inputs of the one before it.
            self.signature = packet.signature or self.signature
            path = log.files / entry.path
            # Bounded by the manifest: a file that grew must not fill the memory of a server.
            read_file = read_own if name == JIT_DENSE_NAME else Location.read
            content = read_file(path, max_bytes=entry.num_bytes)
            if hashlib.sha256(content).hexdigest() != entry.checksum:
                raise CorruptionError(f"{path} is damaged: its checksum is not the packet's")
            return read(content, str(path))
        return None

    def _with_script(self, content: bytes, where: str) -> torch.nn.Module:
        model = read_script(content, where)
        self._script = (content, where)
        return model

    def _with_state(self, content: bytes, where: str) -> torch.nn.Module:
        if self._script is None:
            source = Source(self._location)
            # Read lazily: a training may write its first TorchScript after this server has started.
            load_script(source)  # checked before it is kept
            self.signature = self.signature or source.signature
            self._script = (source.dense(JIT_DENSE_NAME, read_own), str(source.location / JIT_DENSE_NAME))
        model = read_script(*self._script)
        try:
            load_state(model, content, where, map_location="cpu")
        except RuntimeError as failure:
            raise FailedPreconditionError(
                f"{where} does not fit the model of {self._script[1]}: dump a checkpoint with_jit_model=True "
                "of the model as it is trained now; torch says: "
                f"{str(failure).strip().splitlines()[-1].strip()}"
            ) from failure
        return model


def _await_servers(addresses: Sequence[str], position: Position) -> None:
    """Until every parameter server has applied the packet; UnavailableError: one has not in time."""
    # A dense model that is ahead of its rows would predict with embeddings it was not trained on.
    waiting = list(addresses)
    reached: Position | None = None
    for _ in Attempts(_SERVERS_S):
        while waiting:
            reached = _position_of(waiting[0])
            if reached is None or reached.stream != position.stream or reached < position:
                break
            del waiting[0]
        else:
            return
    raise UnavailableError(
        f"the parameter server at {waiting[0]} is at packet {reached}, not yet at {position}"
    )


def _position_of(address: str) -> Position | None:
    """None: the server is at no packet."""
    following = fetch_json(address, "/status")["stats"].get("following")
    if following is None:
        raise FailedPreconditionError(f"the parameter server at {address} follows no packets")
    stream, number = following["stream"], following["number"]
    return None if stream is None else Position(stream, number)


def _nothing() -> None:
    """Rows that stay as they are."""
