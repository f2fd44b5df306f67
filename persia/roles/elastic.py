"""A parameter server's part in a change of the number of servers (ADR 34).

The native server copies its rows, and hands them over. This module answers the coordinator
(persia/launcher/resizing.py), and keeps a server silent while it has not all rows, or no more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from pydantic import StrictBool, model_validator

from persia import env
from persia.checkpoint.protocol import Request, Verb
from persia.checkpoint.server_job import max_processors
from persia.checkpoint.service import CheckpointService
from persia.config import GlobalConfig
from persia.errors import (
    CorruptionError,
    DeadlineExceededError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging.discovery import Advertiser, Directory
from persia.messaging.interface import Registration
from persia.messaging.payloads import JsonMessage, MovedShards
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER
from persia.roles.lifetime import ServerOptions, address_of, wait_for_stop
from persia.storage.manifest import NUM_VIRTUAL_SHARDS
from persia.validation import Count

if TYPE_CHECKING:
    from persia._native import ParameterServer

BUSY = "a checkpoint is being written or loaded: try again after it"
_LOOK_S = 1.0
_SERVERS_PER_LOOK = 10  # that ask all servers in each _LOOK_S
_SILENT_LOOKS = 3  # in a row: in one, answers may be lost
_PIECE_S = 10.0  # a new server that does not take a piece for so long ends the change


class Step(Enum):
    """What the coordinator asks of a server."""

    WHO = "who"
    MEASURE = "measure"  # of an old one: how much load each virtual shard has had
    COPY = "copy"  # of an old one: send your rows and their changes to the new ones
    HAND_OVER = "hand over"  # of an old one: answer nothing any more, and send what has changed last
    GIVE_UP = "give up"  # of an old one: forget the new ones, and answer again
    SERVE = "serve"  # of a new one, which has all rows


@dataclass(frozen=True, kw_only=True)
class ResizeRequest(JsonMessage):
    """Coordinator to server."""

    what = "resize request"

    step: Step
    targets: tuple[tuple[str, str], ...] = ()  # of COPY: address and incarnation of the new servers, by index
    moved_shards: MovedShards = ()  # of COPY: their placement
    percent: Count = 100  # of COPY: what it may take of the processors


@dataclass(frozen=True, kw_only=True)
class ResizeReport(JsonMessage):
    """Server to coordinator."""

    what = "resize report"

    address: str
    incarnation: str  # 16 hex digits
    refusal: str = ""  # why the server cannot be replaced
    state: str = ""  # of its copy: copying, following, handed over, failed; empty: it copies nothing
    num_bytes: Count = 0
    num_rows: Count = 0
    round_s: float = 0.0  # of the last changes that it has sent
    failure: str = ""
    was_sent_rows: StrictBool = False  # of a new one: it has begun to gather
    is_serving: StrictBool = False  # it answers requests
    loads: tuple[Count, ...] = ()  # to MEASURE: since its start, by virtual shard

    @model_validator(mode="after")
    def _check(self) -> ResizeReport:
        if len(self.loads) not in (0, NUM_VIRTUAL_SHARDS):
            raise CorruptionError(f"loads has {len(self.loads)} numbers, not {NUM_VIRTUAL_SHARDS}")
        return self


def refusal_of(config: GlobalConfig) -> str:
    """Why the number of servers with this config cannot be changed; empty if it can."""
    section = config.embedding_parameter_server_config
    if section.standbys:
        return "they have standbys (embedding_parameter_server_config.standbys)"
    if section.storage.has_pool:
        return "their rows are in a storage tier (embedding_parameter_server_config.storage)"
    if section.enable_incremental_update:
        return "incremental updates remember what changes (enable_incremental_update)"
    return ""


def placement_of(session: NatsSession, generation: int) -> MovedShards:
    """For a server that has restarted without rows: the placement that others of its generation have.

    If all of them have restarted, none has one: then the default placement is that of all. That others answer
    too late is found later (`ElasticServer.wait`).
    """
    for _ in range(_SILENT_LOOKS):
        found = Directory(session).present(EMBEDDING_PARAMETER_SERVER, _LOOK_S / 2)
        if tables := [server.moved_shards for server in found if server.generation == generation]:
            return max(tables, key=len)  # one without moved shards may have restarted, too
    return ()


def _pause(replicas: int, news: threading.Event) -> None:
    """Between two looks. Every server answers each look, so more of them look less often, but several times
    in the deadline."""
    num_pauses = max(1, min(replicas // _SERVERS_PER_LOOK, int(env.get_deadline_s() / 10 / _LOOK_S)))
    any(news.wait(_LOOK_S) for _ in range(num_pauses))  # in steps, as `wait_for_stop`


class ElasticServer:
    """Answers the coordinator from `start` to `close`. Thread-safe."""

    def __init__(
        self,
        session: NatsSession,
        server: ParameterServer,
        options: ServerOptions,
        port: int,
        config: GlobalConfig,
    ) -> None:
        self._session, self._server, self._config = session, server, config
        self._address = address_of(options, port)
        self._has_rows = options.sources == 0
        self._was_new = options.sources > 0
        self._lock = threading.Lock()  # between a change and a checkpoint
        self._checkpoints: CheckpointService | None = None
        self._advertiser: Advertiser | None = None
        self._subject = session.subjects.resize(options.generation, options.replica_index)
        self._registration: Registration | None = None

    def close(self) -> None:
        if self._registration is not None:
            self._registration.close()

    @property
    def is_serving(self) -> bool:
        """False: it has not all rows yet, or has handed them over."""
        return self._has_rows and not self._server.has_handed_over

    def not_ready(self) -> str | None:
        """For /health: why it does not answer."""
        if self.is_serving:
            return None
        return "it has handed its rows over" if self._has_rows else "it still gathers its rows"

    def advertisement(self) -> dict[str, Any]:
        """More arguments of `advertised`."""
        return {"is_serving": lambda: self.is_serving}

    def start(self, advertiser: Advertiser, checkpoints: CheckpointService) -> None:
        """Once the server is admitted to the job: before, it could not serve."""
        self._advertiser, self._checkpoints = advertiser, checkpoints
        self._registration = self._session.respond(self._subject, self._answer)

    def wait(self) -> None:
        """Until a signal. Returns for a server that is to start again: a new one that is too late for its
        rows, or one that did not hear which placement its generation has."""
        assert self._advertiser is not None
        news = threading.Event()
        joined = self._session.subjects.advertise(EMBEDDING_PARAMETER_SERVER)
        # A server that begins to serve, or is connected again, says so to all.
        with contextlib.closing(self._session.subscribe(joined, lambda _event: news.set())):
            if self._is_late(self._advertiser, news) or self._is_misplaced(self._advertiser, news):
                return
        wait_for_stop()

    def _is_late(self, advertiser: Advertiser, news: threading.Event) -> bool:
        """Returns once the first rows have come. True for a new server whose predecessor was sent the rows.

        That is so if another one of its generation serves, before which all had their rows. If all have lost
        them, those whose rows they were do not answer any more.
        """
        deadline_s, last_seen, num_silent = env.get_deadline_s(), time.monotonic(), 0
        while not self._has_rows and not self._server.was_sent_rows:
            news.clear()
            is_late, is_early = self._look(advertiser)
            now = time.monotonic()
            last_seen, num_silent = (now, 0) if is_early else (last_seen, num_silent + 1)
            is_late = is_late or (num_silent >= _SILENT_LOOKS and now - last_seen > deadline_s)
            # Asked again: the first rows, and the end of it all, may have come meanwhile.
            if is_late and not self._has_rows and not self._server.was_sent_rows:
                get_default_logger().warning("%s: its rows are lost, and it begins without", advertiser.info)
                return True
            _pause(advertiser.info.replicas, news)
        return False

    def _is_misplaced(self, advertiser: Advertiser, news: threading.Event) -> bool:
        """For a server that has restarted, and has the default placement: returns once all others of its
        generation have it, too, or True once one has another."""
        own, agreed = advertiser.info, set[int]()
        if not own.generation or self._was_new or own.moved_shards:
            return False
        # Not for longer: a server that was replaced may wake, and say what was true before.
        while len(agreed) < own.replicas - 1 and self.is_serving:
            news.clear()
            with contextlib.suppress(UnavailableError, DeadlineExceededError):
                found = Directory(self._session).present(EMBEDDING_PARAMETER_SERVER, _LOOK_S)
                others = [one for one in found if one.generation == own.generation and one.index != own.index]
                if placed := [one for one in others if one.moved_shards]:
                    get_default_logger().warning(
                        "%s begins again: %s has another placement of virtual shards", own, placed[0]
                    )
                    return True
                agreed.update(one.index for one in others)
            if len(agreed) < own.replicas - 1:
                _pause(own.replicas, news)
        return False

    def _look(self, advertiser: Advertiser) -> tuple[bool, bool]:
        """Whether a server of this generation answers requests, and whether one of an older one may live."""
        generation = advertiser.info.generation
        with contextlib.suppress(UnavailableError, DeadlineExceededError):
            serving = Directory(self._session).present(EMBEDDING_PARAMETER_SERVER, _LOOK_S)
            if serving:
                return any(one.generation >= generation for one in serving), True
            others = advertiser.others(_LOOK_S)
            return False, others is None or any(one.generation < generation for one in others)
        return False, True

    def handle_checkpoint(self, payload: bytes) -> bytes | None:
        """`handle` of the CheckpointService. Of the servers before and after, one answers."""
        checkpoints = self._checkpoints
        begins = Request.decode(payload).verb in (Verb.DUMP, Verb.LOAD, Verb.TAKE)
        # One that has handed over refuses what begins: without an answer the asker would wait for long.
        if checkpoints is None or not (self._has_rows if begins else self.is_serving):
            return None
        if not begins:
            return checkpoints.handle(payload)  # without the lock: a poll must not wait for a snapshot
        with self._lock:
            if self._server.transfer is not None:
                raise ResourceExhaustedError("the number of parameter servers is being changed")
            return checkpoints.handle(payload)

    def _answer(self, payload: bytes) -> bytes:
        request = ResizeRequest.decode(payload)
        if request.step is Step.COPY:
            self._copy(request)
        elif request.step is Step.HAND_OVER:
            self._server.hand_over()
        elif request.step is Step.GIVE_UP:
            with self._lock:  # after a COPY that has begun, whose copy none would end
                self._server.resume()
        elif request.step is Step.SERVE:
            self._serve()
        loads = self._server.shard_loads if request.step is Step.MEASURE else ()
        return self._report(tuple(loads)).encode()

    def _report(self, loads: tuple[int, ...]) -> ResizeReport:
        progress = self._server.transfer or {}
        return ResizeReport(
            address=self._address,
            incarnation=f"{self._server.incarnation:016x}",
            refusal=refusal_of(self._config) or self._server.transfer_refusal or self._busy_with(),
            was_sent_rows=self._server.was_sent_rows,
            is_serving=self.is_serving,
            loads=loads,
            **progress,
        )

    def _busy_with(self) -> str:
        if self._checkpoints is not None and self._checkpoints.is_busy:
            return BUSY
        return ""

    def _copy(self, request: ResizeRequest) -> None:
        # Without a wait: the coordinator may give up meanwhile, and the copy would begin after that.
        if not self._lock.acquire(blocking=False):
            raise FailedPreconditionError(BUSY)
        try:
            if reason := self._busy_with():
                raise FailedPreconditionError(reason)
            targets = [(address, int(incarnation, 16)) for address, incarnation in request.targets]
            processors = max_processors(request.percent)
            self._server.begin_transfer(
                targets,
                moved_shards=request.moved_shards,
                max_processors=processors,
                deadline_s=_PIECE_S,
            )
        finally:
            self._lock.release()

    def _serve(self) -> None:
        assert self._advertiser is not None
        self._server.serve()
        if not self._has_rows:
            # First: once it has its rows, another thread may answer who it is.
            self._advertiser.change(moved_shards=tuple(self._server.moved_shards))
            self._has_rows = True
            self._advertiser.publish_again()
            get_default_logger().info("%s has its rows, and answers", self._advertiser.info)
