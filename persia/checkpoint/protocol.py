"""Messages between coordinator and server about a dump or a load, as JSON and as typed values.

A request names its operation by an id, so that one repeated after a lost reply is recognised. Replies are
small whatever the model's size: rows go from the servers straight to the storage. Layouts:
docs/wire_format.md, "NATS messages".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, InstanceOf, PlainSerializer

from persia import errors
from persia.errors import InternalError, PersiaError
from persia.messaging.payloads import JsonMessage
from persia.validation import Count, complaint, read_document

# A marker in a dump's folder, written before servers are asked. It shows servers that their directory is the
# coordinator's. The coordinator commits the dump by renaming it: a server prevents that by removing it.
IN_PLACE_NAME = "in_place"


_T = TypeVar("_T")


class Verb(Enum):
    """The kinds of requests."""

    DUMP = "dump"  # take a snapshot and write it
    LOAD = "load"  # check all of a checkpoint that concerns this server
    TRACK = "track"  # remember the changes for a stream of packets from now on
    CHANGES = "changes"  # how many there are
    TAKE = "take"  # write the changes
    APPLY = "apply"  # what was checked: replace the rows by it; what was written: forget the changes
    POLL = "poll"
    CANCEL = "cancel"


class State(Enum):
    """The state of an operation on one server."""

    RUNNING = "running"
    CHECKED = "checked"  # a load, or changes that were written: it waits for `apply`
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Request(JsonMessage):
    """Coordinator to server."""

    what = "checkpoint request"

    verb: Verb
    operation: str
    arguments: dict[str, Any] = field(default_factory=dict)  # of the verb: see server_job
    # The servers that the coordinator has found: their number, 0 where it does not say, and their generation.
    replicas: Count = 0
    generation: Count = 0

    def read(self, kind: type[_T]) -> _T:
        """The arguments as a dataclass. CorruptionError names the one that is wrong."""
        return read_document(kind, self.arguments, f"{self.what}: {self.verb.value}")


def _read_error(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise complaint("must be a class and a message")
    name, text = value
    # The class is kept, as callers decide by it whether to repeat. Its name comes from the network: only our
    # own classes may be looked up with it.
    return (getattr(errors, name) if name in errors.__all__ else InternalError)(text)


@dataclass(frozen=True, kw_only=True)
class Report(JsonMessage):
    """Server to coordinator: the state of the operation."""

    what = "checkpoint report"

    state: State
    done_bytes: Count = 0  # grows while the operation lives
    done_rows: Count = 0
    total_rows: Count = 0
    error: Annotated[
        InstanceOf[PersiaError] | None,
        BeforeValidator(_read_error),
        PlainSerializer(lambda error: None if error is None else [type(error).__name__, str(error)]),
    ] = None  # why it failed
    result: dict[str, Any] | None = None  # of what is done, and of changes that are written
