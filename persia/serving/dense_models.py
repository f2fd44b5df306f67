"""The dense model of checkpoints and packets: TorchScript, or a state_dict for TorchScript that is known."""

from __future__ import annotations

import hashlib

import torch

from persia.checkpoint.checkpoints import Source
from persia.errors import CorruptionError, FailedPreconditionError, NotFoundError
from persia.packets.log import PacketLog
from persia.packets.packet import Packet
from persia.serving.predictor import JIT_DENSE_NAME, load_script, read_script
from persia.storage.dense import load_state
from persia.storage.location import Location

_STATE_NAME = "dense.pt"


class DenseModels:
    """A model is TorchScript with its weights. Packets mostly have new weights alone, as a state_dict: they
    go into the script that was seen last, or else that of `location`. Each call makes a model of its own.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._script: tuple[bytes, str] | None = None  # and where it was found

    def of_checkpoint(self, source: Source) -> torch.nn.Module:
        """NotFoundError: there is no dense model, or no script for it; CorruptionError."""
        try:
            content = source.dense(JIT_DENSE_NAME)
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
            path = log.files / entry.path
            content = path.read(max_bytes=entry.num_bytes)
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
            load_script(source)  # checked before it is kept
            self._script = (source.dense(JIT_DENSE_NAME), str(source.location / JIT_DENSE_NAME))
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
