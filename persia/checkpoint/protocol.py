"""What a coordinator and a server say to each other about a dump or a load, as JSON and as typed values.

A request names its operation by an id, so that one repeated after a lost reply is recognised. Replies are
small whatever the model's size: rows go from the servers straight to the storage. Layouts:
docs/wire_format.md, "NATS messages".
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from persia import errors
from persia.errors import CorruptionError, InternalError, PersiaError
from persia.messaging.payloads import json_int, json_object

__all__ = ["IN_PLACE_NAME", "Report", "Request", "State", "Verb"]

# In a dump's folder, from its beginning on. Servers see by it that their directory is the coordinator's, and
# the file that makes the dump count is made of it: who removes it keeps the dump from counting.
IN_PLACE_NAME = "in_place"


class Verb(Enum):
    """What a coordinator asks for."""

    DUMP = "dump"  # take a snapshot and write it
    LOAD = "load"  # check all of a checkpoint that concerns this server
    TRACK = "track"  # remember the changes for a stream of packets from now on
    CHANGES = "changes"  # how many there are
    TAKE = "take"  # write the changes
    APPLY = "apply"  # what was checked: replace the rows by it; what was written: forget the changes
    POLL = "poll"
    CANCEL = "cancel"


class State(Enum):
    """Where an operation stands on one server."""

    RUNNING = "running"
    CHECKED = "checked"  # a load, or changes that were written: it waits for `apply`
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Coordinator to server."""

    verb: Verb
    operation: str
    arguments: dict[str, Any] = field(default_factory=dict)  # of the verb: see server_job

    def encode(self) -> bytes:
        values = {"verb": self.verb.value, "operation": self.operation, "arguments": self.arguments}
        return json.dumps(values).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Request:
        values = json_object(payload, "checkpoint request")
        operation, arguments = values.get("operation"), values.get("arguments")
        if not isinstance(operation, str) or not isinstance(arguments, dict):
            raise CorruptionError("checkpoint request: it has no operation and arguments")
        try:
            verb = Verb(values.get("verb"))
        except ValueError as error:
            raise CorruptionError(f"checkpoint request: {error}") from error
        return cls(verb=verb, operation=operation, arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Server to coordinator: where the operation stands."""

    state: State
    done_bytes: int = 0  # grows while the operation lives
    done_rows: int = 0
    total_rows: int = 0
    error: PersiaError | None = None  # why it failed
    result: dict[str, Any] | None = None  # of what is done, and of changes that are written

    def encode(self) -> bytes:
        error = None if self.error is None else [type(self.error).__name__, str(self.error)]
        return json.dumps({**self.__dict__, "state": self.state.value, "error": error}).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Report:
        what = "checkpoint report"
        values = json_object(payload, what)
        result = values.get("result")
        if result is not None and not isinstance(result, dict):
            raise CorruptionError(f"{what}: result is {result!r:.80}, not an object")
        try:
            state = State(values.get("state"))
        except ValueError as failure:
            raise CorruptionError(f"{what}: {failure}") from failure
        numbers = {key: json_int(values, key, what) for key in ("done_bytes", "done_rows", "total_rows")}
        return cls(state=state, error=_error(values.get("error"), what), result=result, **numbers)


def _error(value: object, what: str) -> PersiaError | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise CorruptionError(f"{what}: error is {value!r:.80}, not a class and a message")
    name, text = value
    # The name comes from the network: only our own classes may be looked up with it.
    kind = getattr(errors, name) if name in errors.__all__ else InternalError
    made: PersiaError = kind(text)
    return made
