"""The bodies of the NATS messages between loaders, embedding workers and NN workers, as bytes and as typed
values.

Pure functions without sockets: everything a peer sends is checked here, once, before anybody acts on it.
Layouts: docs/wire_format.md, "NATS messages". Malformed bytes raise `CorruptionError`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum

from persia.errors import CorruptionError
from persia.validation import Count, json_object, read_document, to_json

__all__ = ["BatchAnnouncement", "EndOfStream", "FlowReply", "IdsReply", "IdsRequest", "ReplyStatus"]

# Little endian, without padding: the layouts of docs/wire_format.md. Bodies follow their header unchanged:
# features may have many megabytes, and are only decoded by the native module.
_IDS_HEADER = struct.Struct("<II")
_IDS_REPLY = struct.Struct("<IIQQ")
_FLOW_REPLY = struct.Struct("<II")
_ANNOUNCEMENT = struct.Struct("<QQQIIII")


class ReplyStatus(IntEnum):
    """Outcome of a message with back-pressure."""

    OK = 0
    FULL = 1  # send it again after retry_ms
    ERROR = 2  # the message text says why; sending it again does not help
    CLOSED = 3  # the rank has left its training loop and takes nothing more


@dataclass(frozen=True)
class IdsRequest:
    """Loader to embedding worker: ID features to register."""

    loader_index: int
    loader_replicas: int
    id_features: bytes | memoryview  # the wire format's "ID features", not decoded here

    def encode(self) -> bytes:
        return b"".join((_IDS_HEADER.pack(self.loader_index, self.loader_replicas), self.id_features))

    @classmethod
    def decode(cls, payload: bytes) -> IdsRequest:
        loader_index, loader_replicas = _unpack(_IDS_HEADER, payload, "ids request")
        _check_replica("ids request", loader_index, loader_replicas)
        return cls(loader_index, loader_replicas, memoryview(payload)[_IDS_HEADER.size :])


@dataclass(frozen=True)
class IdsReply:
    """Embedding worker to loader: the reference under which the ID features wait, or why they do not."""

    status: ReplyStatus
    retry_ms: int = 0
    worker_incarnation: int = 0
    reference: int = 0
    message: str = ""

    def encode(self) -> bytes:
        head = _IDS_REPLY.pack(self.status, self.retry_ms, self.worker_incarnation, self.reference)
        return head + self.message.encode()

    @classmethod
    def decode(cls, payload: bytes) -> IdsReply:
        status, retry_ms, incarnation, reference = _unpack(_IDS_REPLY, payload, "ids reply")
        text = _text(payload[_IDS_REPLY.size :], "ids reply")
        return cls(_status(status, "ids reply"), retry_ms, incarnation, reference, text)


@dataclass(frozen=True)
class FlowReply:
    """NN worker to loader: the answer to a batch announcement or an end of stream."""

    status: ReplyStatus
    retry_ms: int = 0
    message: str = ""

    def encode(self) -> bytes:
        return _FLOW_REPLY.pack(self.status, self.retry_ms) + self.message.encode()

    @classmethod
    def decode(cls, payload: bytes) -> FlowReply:
        status, retry_ms = _unpack(_FLOW_REPLY, payload, "flow reply")
        text = _text(payload[_FLOW_REPLY.size :], "flow reply")
        return cls(_status(status, "flow reply"), retry_ms, text)


@dataclass(frozen=True)
class BatchAnnouncement:
    """Loader to NN worker: a batch's dense part, and where its ID features wait."""

    batch_id: int
    worker_incarnation: int
    reference: int
    worker_index: int
    loader_index: int
    loader_replicas: int
    requires_grad: bool
    dense: bytes | memoryview  # the wire format's "dense section", not decoded here

    def encode(self) -> bytes:
        head = _ANNOUNCEMENT.pack(
            self.batch_id,
            self.worker_incarnation,
            self.reference,
            self.worker_index,
            self.loader_index,
            self.loader_replicas,
            int(self.requires_grad),
        )
        return b"".join((head, self.dense))

    @classmethod
    def decode(cls, payload: bytes) -> BatchAnnouncement:
        what = "batch announcement"
        batch_id, incarnation, reference, worker, loader, replicas, requires_grad = _unpack(
            _ANNOUNCEMENT, payload, what
        )
        if requires_grad not in (0, 1):
            raise CorruptionError(f"{what}: requires_grad is {requires_grad}, not 0 or 1")
        _check_replica(what, loader, replicas)
        # Loaders number their batches in turns: two of them must never use the same id.
        if batch_id % replicas != loader:
            raise CorruptionError(f"{what}: batch_id {batch_id} is not one of loader {loader} of {replicas}")
        dense = memoryview(payload)[_ANNOUNCEMENT.size :]
        return cls(batch_id, incarnation, reference, worker, loader, replicas, bool(requires_grad), dense)


@dataclass(frozen=True)
class EndOfStream:
    """Loader to NN worker: this loader has sent all it will, or has failed."""

    loader_index: Count
    loader_replicas: Count
    num_batches: Count  # sent by this loader, to all ranks together
    error: str | None = None  # why the loader failed

    def encode(self) -> bytes:
        return json.dumps(to_json(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> EndOfStream:
        end = read_document(cls, json_object(payload, "end of stream"), "end of stream")
        _check_replica("end of stream", end.loader_index, end.loader_replicas)
        return end


def _unpack(layout: struct.Struct, payload: bytes, what: str) -> tuple[int, ...]:
    if len(payload) < layout.size:
        raise CorruptionError(f"{what}: {len(payload)} bytes, shorter than its header of {layout.size}")
    return layout.unpack_from(payload)


def _check_replica(what: str, index: int, replicas: int) -> None:
    if index >= replicas:
        raise CorruptionError(f"{what}: loader_index {index} is not below loader_replicas {replicas}")


def _status(value: int, what: str) -> ReplyStatus:
    try:
        return ReplyStatus(value)
    except ValueError as error:
        raise CorruptionError(f"{what}: unknown status {value}") from error


def _text(payload: bytes, what: str) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"{what}: its message is not UTF-8") from error
