"""The bodies of the messages between loaders, embedding workers and NN workers, as bytes and as typed values.

In: what a peer has sent, which is checked here, once, before anybody acts on it: anything else raises
`CorruptionError`. Out: typed values, or bytes to send. No sockets. Layouts: docs/wire_format.md, "NATS
messages".
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, StrictBool, model_validator
from typing_extensions import Self

from persia.errors import CorruptionError
from persia.validation import Count, json_object, read_document, to_json

MAX_REPLICAS = 65_536  # bounds what one message can make a receiver count
# Of `m` bounds: the batches `r`, `r + m`, `r + 2m`, ... below the `r`-th one are trained.
Stripe = Annotated[tuple[Count, ...], Field(min_length=1, max_length=1 << 20)]
Stripes = Annotated[tuple[Stripe, ...], Field(max_length=1024)]
# Virtual shards that another parameter server has than the default one, and their servers (ADR 67).
_MovedShard = tuple[Annotated[Count, Field(lt=4096)], Annotated[Count, Field(lt=MAX_REPLICAS)]]
MovedShards = Annotated[tuple[_MovedShard, ...], Field(max_length=4096)]


def check_moved_shards(moved: MovedShards, num_servers: int) -> None:
    """Raises `CorruptionError` for a placement that these servers cannot have."""
    if len({shard for shard, _ in moved}) < len(moved):
        raise CorruptionError("moved_shards has a virtual shard twice")
    if any(server >= num_servers for _, server in moved):
        raise CorruptionError(f"moved_shards has another server than {num_servers} replicas")


class ReplyStatus(IntEnum):
    """Outcome of a message with back-pressure."""

    OK = 0
    FULL = 1  # send it again after retry_ms
    ERROR = 2  # the message text says why; sending it again does not help
    CLOSED = 3  # the rank has left its training loop and takes nothing more
    FAILED = 4  # the same, by an error, which the message text has


class JsonMessage:
    """Base of messages that are JSON, and small: those that are not sent once a batch."""

    what: ClassVar[str]  # names the message in errors

    def encode(self) -> bytes:
        return json.dumps(to_json(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Raises `CorruptionError` on anything that a peer could not have sent."""
        return read_document(cls, json_object(payload, cls.what), cls.what)


class _PackedMessage:
    """Base of messages of integers and a body, which is the last field and fills the rest of the payload."""

    what: ClassVar[str]  # names the message in errors
    layout: ClassVar[struct.Struct]  # of all fields but the last, in their order

    def encode(self) -> bytes:
        *head, body = vars(self).values()
        # Joined once: features may have many megabytes, and only the native module decodes them.
        return b"".join((self.layout.pack(*head), body.encode() if isinstance(body, str) else body))

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Raises `CorruptionError` on anything that a peer could not have sent."""
        size = cls.layout.size
        if len(payload) < size:
            raise CorruptionError(f"{cls.what}: {len(payload)} bytes, shorter than its header of {size}")
        try:
            # A view: the body is not copied.
            return cls._read(*cls.layout.unpack_from(payload), memoryview(payload)[size:])
        except ValueError as error:
            raise CorruptionError(f"{cls.what}: {error}") from error

    # By hand and not by pydantic, which takes three times as long: these are decoded for every batch.
    @classmethod
    def _read(cls, *values: Any) -> Self:
        """The message of its fields on the wire. ValueError: a peer could not have sent them."""
        return cls(*values)


_OfLoader = TypeVar("_OfLoader", bound="IdsRequest | SubmittedBatch | EndOfStream | PositionRequest")


def _checked_replica(message: _OfLoader) -> _OfLoader:
    if message.loader_index >= message.loader_replicas:
        raise ValueError(
            f"loader_index {message.loader_index} is not below loader_replicas {message.loader_replicas}"
        )
    return message


@dataclass(frozen=True)
class IdsRequest(_PackedMessage):
    """Loader to embedding worker: ID features to register."""

    what = "ids request"
    layout = struct.Struct("<II")

    loader_index: int
    loader_replicas: int
    id_features: bytes | memoryview  # the wire format's "ID features", not decoded here

    @classmethod
    def _read(cls, *values: Any) -> Self:
        return _checked_replica(super()._read(*values))


@dataclass(frozen=True)
class FlowReply(_PackedMessage):
    """Embedding worker or NN worker to loader: the answer to each of the messages here."""

    what = "flow reply"
    layout = struct.Struct("<IIQQ")

    status: ReplyStatus
    retry_ms: int = 0
    # Where registered ID features wait for their lookup; 0 in other replies.
    worker_incarnation: int = 0
    reference: int = 0
    message: str = ""

    @classmethod
    def _read(cls, *values: Any) -> Self:
        status, retry_ms, incarnation, reference, message = values
        return cls(ReplyStatus(status), retry_ms, incarnation, reference, str(message, "utf-8"))


@dataclass(frozen=True)
class SubmittedBatch(_PackedMessage):
    """Loader to NN worker: a batch's dense part, and where its ID features wait.

    It has the ID features, too: the rank registers them again if their embedding worker dies.
    """

    what = "submitted batch"
    layout = struct.Struct("<QQQIIIIQ")

    batch_id: int
    worker_incarnation: int
    reference: int
    worker_index: int
    loader_index: int
    loader_replicas: int
    requires_grad: bool
    dense: bytes | memoryview  # the wire format's "dense section", not decoded here
    id_features: bytes | memoryview = b""  # as in an `IdsRequest`

    def encode(self) -> bytes:
        *head, dense, id_features = vars(self).values()
        return b"".join((self.layout.pack(*head, len(dense)), dense, id_features))

    @classmethod
    def _read(cls, *values: Any) -> Self:
        *head, requires_grad, num_dense, body = values
        if requires_grad not in (0, 1):
            raise ValueError(f"requires_grad is {requires_grad}, not 0 or 1")
        if num_dense > len(body):
            raise ValueError(f"a dense section of {num_dense} bytes, and {len(body)} are left")
        dense, id_features = body[:num_dense], body[num_dense:]
        batch = _checked_replica(super()._read(*head, bool(requires_grad), dense, id_features))
        # Loaders number their batches in turns: two of them must never use the same id.
        if batch.batch_id % batch.loader_replicas != batch.loader_index:
            raise ValueError(
                f"batch_id {batch.batch_id} is not one of loader {batch.loader_index} "
                f"of {batch.loader_replicas}"
            )
        return batch


@dataclass(frozen=True)
class EndOfStream(JsonMessage):
    """Loader to NN worker: this loader has sent all it will, or has failed."""

    what = "end of stream"

    loader_index: Count
    loader_replicas: Count
    num_batches: Count  # of this loader, to all ranks together; those that a checkpoint had included
    error: str | None = None  # why the loader failed

    _check = model_validator(mode="after")(_checked_replica)


@dataclass(frozen=True)
class PositionRequest(JsonMessage):
    """Loader to NN worker: which of my batches do you not need?"""

    what = "position request"

    loader_index: Count
    loader_replicas: Annotated[Count, Field(le=MAX_REPLICAS)]
    resume: StrictBool  # continue after the batches of the checkpoint; else these are another data set's

    _check = model_validator(mode="after")(_checked_replica)


@dataclass(frozen=True)
class PositionReply(JsonMessage):
    """The answer: batches that were trained before this run, and what arrived since."""

    what = "position reply"

    trained: Stripes  # of all loaders, to all ranks (persia/pipeline/position.py)
    received: Count  # this rank has all batches of this loader below this batch_id


@dataclass(frozen=True)
class TakenRequest(JsonMessage):
    """Rank 0 to another rank: what have you trained at this step?"""

    what = "taken request"

    step: Count


@dataclass(frozen=True)
class TakenReply(JsonMessage):
    """The answer, once the rank has trained that step and its updates are applied."""

    what = "taken reply"

    # By loader: the rank has trained all its batches below this batch_id. None: no loader has sent anything.
    bounds: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_REPLICAS)] | None
