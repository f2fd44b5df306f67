"""One dump or load over all servers of a job, from the first request to the last report.

Servers work by themselves. The coordinator polls them, which also keeps the operation alive. Every wait has a
deadline: an error names the server that does not answer or makes no progress, and the others are cancelled.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from persia.checkpoint.peers import Peer
from persia.checkpoint.progress import Progress, ProgressCallback
from persia.checkpoint.protocol import IN_PLACE_NAME, Report, Request, State, Verb
from persia.errors import (
    CorruptionError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PersiaError,
    ResourceExhaustedError,
    StorageError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool
from persia.pipeline.queues import Deadline
from persia.storage.checksummed_json import encode_pointer
from persia.storage.location import Location
from persia.storage.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    EmbeddingSection,
    FileEntry,
    Manifest,
    utc_now,
)
from persia.storage.position import Position
from persia.storage.versions import is_latest, latest_of
from persia.validation import read_document

__all__ = [
    "DumpOperation",
    "LoadOperation",
    "Operation",
    "agreed",
    "check_visible",
]

_CALL_TIMEOUT_S = 10.0
# A server that has taken part in an operation and is silent for so long is considered dead: after a restart
# it knows nothing of the operation.
_SILENCE_S = 30.0
_FIRST_POLL_S = 0.02
_LONGEST_POLL_S = 1.0
_RETRY_S = 0.25
_KEEP_ALIVE_S = 5.0  # must be far below a server's lease
_MAX_PARALLEL_CALLS = 32


@dataclass
class Operation:
    """Asks all servers the same question, repeats it, and judges the answers. The base of all operations."""

    operation: str
    peers: Sequence[Peer]
    deadline_s: float  # without an answer, or without progress
    on_progress: ProgressCallback = lambda _: None  # called on the thread that waits for the servers
    _last_done: tuple[int, int] = field(default=(-1, -1), init=False)  # bytes, rows
    _last_progress: float = field(default=0.0, init=False)

    @property
    def progress_at(self) -> float:
        """`time.monotonic()` when the last byte was moved so far."""
        return self._last_progress

    def cancel(self) -> None:
        """Cancels the operation on every server."""

        def cancel(peer: Peer) -> None:
            # A server that cannot be reached ends it by its lease. The error that led here is more useful.
            with contextlib.suppress(PersiaError):
                peer.call(Request(verb=Verb.CANCEL, operation=self.operation), _CALL_TIMEOUT_S)

        self._on_all(cancel)

    def _ask_all(self, verb: Verb, arguments: dict[str, Any] | None = None) -> list[Report]:
        request = Request(verb=verb, operation=self.operation, arguments=arguments or {})
        reports: list[Report] = self._on_all(lambda peer: self._ask(peer, request))
        return reports

    def _poll(self) -> list[Report]:
        """The reports of all servers; raises the first failure in them."""
        reports = self._ask_all(Verb.POLL)
        for peer, report in zip(self.peers, reports, strict=True):
            if report.error is not None:
                raise type(report.error)(f"{peer}: {report.error}")
        return reports

    def _await(self, phase: str, wanted: State) -> list[Report]:
        """Polls until every server is in the state `wanted`."""
        self._last_done, self._last_progress = (-1, -1), time.monotonic()
        pause_s = _FIRST_POLL_S
        while True:
            reports = self._poll()
            self._note_progress(phase, reports, wanted)
            if all(report.state is wanted for report in reports):
                return reports
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _note_progress(self, phase: str, reports: Sequence[Report], wanted: State) -> None:
        num_bytes = sum(report.done_bytes for report in reports)
        done_rows = sum(report.done_rows for report in reports)
        if (num_bytes, done_rows) != self._last_done:
            self._last_done, self._last_progress = (num_bytes, done_rows), time.monotonic()
        elif time.monotonic() - self._last_progress > self.deadline_s:
            behind = [str(peer) for peer, r in zip(self.peers, reports, strict=True) if r.state is not wanted]
            raise DeadlineExceededError(
                f"{self.operation}: no byte was moved for {self.deadline_s:g} s (PERSIA_DEADLINE_SEC); "
                f"not done: {', '.join(behind)}"
            )
        total_rows = sum(report.total_rows for report in reports)
        self.on_progress(Progress(phase, num_bytes, done_rows, total_rows))

    def _ask(self, peer: Peer, request: Request) -> Report:
        """Repeats the request until it is answered; UnavailableError names a server that is silent."""
        is_first = request.verb in (Verb.DUMP, Verb.LOAD)
        patience_s = self.deadline_s if is_first else min(self.deadline_s, _SILENCE_S)
        deadline = Deadline(patience_s)
        while True:
            try:
                return peer.call(request, min(_CALL_TIMEOUT_S, max(deadline.left_s(), 0.1)))
            except NotFoundError as failure:
                raise UnavailableError(
                    f"{peer} has restarted during {self.operation}, which it no longer knows"
                ) from failure
            except ResourceExhaustedError as failure:
                # Changes can wait. To wait for them here would hold up this process' own dumps.
                if deadline.over or request.verb is Verb.TAKE:
                    raise ResourceExhaustedError(f"{peer}: {failure}") from failure
            except (UnavailableError, DeadlineExceededError) as failure:
                if deadline.over:
                    raise UnavailableError(
                        f"{peer} has not answered for {patience_s:g} s during {self.operation}: {failure}"
                    ) from failure
            except PersiaError as failure:
                raise type(failure)(f"{peer}: {failure}") from failure
            time.sleep(_RETRY_S)

    def _on_all(self, function: Callable[[Peer], Any]) -> list[Any]:
        """Calls `function` with every peer in parallel; it must end by itself. Raises the first error."""
        if len(self.peers) == 1:
            return [function(self.peers[0])]
        pool = DaemonPool(min(len(self.peers), _MAX_PARALLEL_CALLS), f"persia-{self.operation}")
        try:
            futures: list[Future[Any]] = [pool.submit(function, peer) for peer in self.peers]
            return [future.result() for future in futures]
        finally:
            pool.close()


@dataclass
class DumpOperation(Operation):
    """Writes the rows of all servers into the folder `operation` of `directory`."""

    directory: Location = field(kw_only=True)
    keep_small_rows: bool = field(default=False, kw_only=True)  # those below their slot's min_norm
    with_state: bool = field(default=True, kw_only=True)  # of the optimizer
    in_place: bool = field(default=False, kw_only=True)  # rows stay in the servers' pools
    is_version: bool = field(default=False, kw_only=True)  # `latest` beside `directory` is to name it
    step: int | None = field(default=None, kw_only=True)  # of the training loop
    _decision: threading.Lock = field(default_factory=threading.Lock, init=False)
    _given_up: bool = field(default=False, init=False)
    _counts: bool = field(default=False, init=False)
    _needs_latest: bool = field(default=False, init=False)  # to count: the manifest alone is not enough

    def begin(self) -> None:
        """Returns when every server has taken its snapshot: training may continue."""
        if self.directory.is_of_this_process and any(peer.is_remote for peer in self.peers):
            raise InvalidArgumentError(
                f"{self.directory} exists in this process only, and the rows are in others: use a directory "
                "or storage service that all reach"
            )
        try:
            self._needs_latest = self.in_place and self.is_version and not is_latest(self.directory)
            arguments = {
                "directory": str(self.directory),
                "needs_latest": self._needs_latest,
                "keep_small_rows": self.keep_small_rows,
                "with_state": self.with_state,
                "in_place": self.in_place,
                "step": self.step,
            }
            if self.in_place:
                # Servers look for it, as they must see the directory in which the manifest will decide.
                with self._marker.create() as marker:
                    marker.write(self.operation.encode())
            self._ask_all(Verb.DUMP, arguments)
        except BaseException:
            self.give_up()
            raise

    @contextlib.contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Polls while this process does something else, or the leases on the servers would end."""
        if not self.peers:
            yield
            return
        over = threading.Event()

        def ask() -> None:
            while not over.wait(_KEEP_ALIVE_S):
                with contextlib.suppress(PersiaError):  # the wait for the servers finds what is wrong
                    self._ask_all(Verb.POLL)

        thread = threading.Thread(target=ask, name=f"persia-{self.operation}-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def finish(
        self, optimizer: dict[str, Any] | None = None, packets: Position | None = None
    ) -> EmbeddingSection:
        """Waits until all is written. `packets`: the last one that was cut before `begin`."""
        try:
            reports = self._await("writing", State.CHECKED if self.in_place else State.DONE)
            section = replace(self._section(reports, optimizer), packets=packets)
            check_visible(self.directory, section.files)
            return section
        except BaseException:
            self.give_up()
            raise

    def cancel(self) -> None:
        """As `Operation.cancel`, unless the manifest names the rows already: servers must commit those."""
        with self._decision:
            if self._counts:
                return
            self._given_up = True
        super().cancel()

    @property
    def _marker(self) -> Location:
        return self.directory / self.operation / IN_PLACE_NAME

    def publish(self, manifest: bytes) -> None:
        """After `finish`: from here on the rows count. An error gives the dump up, and what was there before
        counts. FailedPreconditionError, UnavailableError: it was given up before, from here or by a server.
        """
        try:
            with self._decision:
                if self._given_up:
                    raise FailedPreconditionError(f"{self.operation} was cancelled: dump again")
                if self.in_place:
                    self._publish_in_place(manifest)
                else:
                    (self.directory / MANIFEST_NAME).replace(manifest)
                self._counts = True
        except (FailedPreconditionError, UnavailableError):
            self.give_up()
            raise
        except StorageError as failure:
            # A storage service that did not answer may still store the manifest, whose files must exist then.
            # The next dump removes what was left behind in vain.
            if self.directory.is_local:
                self.give_up()
            raise StorageError(f"{failure}; what was there before is what counts") from failure

    def _publish_in_place(self, manifest: bytes) -> None:
        """Publishes in one step, which fails if a server has removed the marker."""
        target = self.directory / MANIFEST_NAME
        try:
            if self._needs_latest:
                self._publish_by_latest(target, manifest)
            else:
                self._marker.turn_into(target, manifest)
        except NotFoundError as failure:
            raise UnavailableError(
                f"a server has given {self.operation} up: it was started again, or has not heard of this "
                "process for long; dump again"
            ) from failure

    def _publish_by_latest(self, target: Location, manifest: bytes) -> None:
        """Publishes by `latest`, once the manifest exists. After an error the old manifest is back."""
        before = target.read_replaced(max_bytes=MAX_MANIFEST_BYTES) if target.exists_replaced() else None
        target.replace(manifest)
        try:
            self._marker.turn_into(latest_of(self.directory), encode_pointer(self.directory.name))
        except PersiaError as failure:
            # A storage service may have done what it reports as failed.
            if isinstance(failure, NotFoundError) or self.directory.is_local:
                if before is None:
                    target.remove_quietly()
                else:
                    target.replace(before)
            raise

    def commit(self) -> None:
        """After `publish` of rows in place: servers go back to them. Raises what keeps one from it, once all
        have been asked.
        """
        self._last_progress = time.monotonic()
        failures: list[PersiaError] = []

        def commit_at(peer: Peer) -> None:
            try:
                self._commit_at(peer)
            except PersiaError as failure:
                failures.append(failure)

        self._on_all(commit_at)
        if failures:
            raise failures[0]

    def _commit_at(self, peer: Peer) -> None:
        try:
            report = self._apply_at(peer)
        except UnavailableError as failure:
            self._require_known(peer, failure)
            return
        if report.error is not None:
            raise StorageError(
                f"{peer} has lost its part of the checkpoint in {self.directory}, which cannot be loaded: "
                f"{report.error}; dump again"
            )
        if report.state is not State.DONE:
            raise StorageError(
                f"{peer} has not committed the checkpoint in {self.directory} within {self.deadline_s:g} s "
                "(PERSIA_DEADLINE_SEC): see to its device, and dump again"
            )

    def _apply_at(self, peer: Peer) -> Report:
        """The last report of a server that was told to commit, at the latest at the deadline."""
        pause_s, deadline = _FIRST_POLL_S, Deadline(self.deadline_s)
        report = self._ask(peer, Request(verb=Verb.APPLY, operation=self.operation))
        while report.state not in (State.DONE, State.FAILED) and not deadline.over:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
            report = self._ask(peer, Request(verb=Verb.POLL, operation=self.operation))
        return report

    def _require_known(self, peer: Peer, failure: UnavailableError) -> None:
        """A lost server reads at its next start that the checkpoint counts. UnavailableError: not surely, as
        it may have taken the marker away before the manifest had arrived."""
        is_marked = False  # also where that cannot be told
        with contextlib.suppress(StorageError):
            is_marked = self._marker.exists()
        if not self.directory.is_local and not is_marked:
            raise UnavailableError(
                f"{peer} was lost while the manifest was on its way to {self.directory}, and may have "
                f"given its part of the checkpoint up: {failure}; dump again"
            )
        get_default_logger().warning(
            "the checkpoint in %s is complete, but a server was lost before it could say so; it will "
            "find out when it starts again: %s",
            self.directory,
            str(failure),
        )

    def give_up(self) -> None:
        """Cancels the dump and removes its files."""
        self.cancel()
        (self.directory / self.operation).remove_quietly()

    def _section(self, reports: Sequence[Report], optimizer: dict[str, Any] | None) -> EmbeddingSection:
        results = [report.result or {} for report in reports]
        what = f"the report of {self.operation}"
        # The manifest's own reader judges what servers say, too.
        values = {
            "dump_id": self.operation,
            "created_at": utc_now(),
            "train_config": agreed(results, "train_config", self.peers),
            "schema": agreed(results, "schema", self.peers),
            "servers": results,
            "files": [file for result in results for file in result.get("files", ())],
            "optimizer": optimizer,
            "has_state": self.with_state,
            "in_place": self.in_place,
        }
        return read_document(EmbeddingSection, values, what)


@dataclass
class LoadOperation(Operation):
    """Replaces the rows of all servers by those of a checkpoint, once all servers have checked it."""

    directory: Location = field(kw_only=True)

    def check(
        self,
        *,
        train_config: bytes | None = None,
        with_state: bool = True,
        fresh_state: bool = False,
        strict: bool = True,
    ) -> EmbeddingSection:
        """Returns what will be loaded once every server has checked its part; replaces nothing yet.

        `train_config` is for the training that follows; None: the checkpoint's. `fresh_state` gives rows the
        state of new rows. Without `with_state` rows have none, and cannot be trained.
        """
        manifest, digest = Manifest.read(self.directory)
        if manifest.embeddings is None:
            raise NotFoundError(f"{self.directory} has no embeddings: only its dense part was dumped")
        section = manifest.embeddings
        config = train_config.hex() if train_config is not None else section.train_config
        self._check_section(section, config, with_state=with_state, fresh_state=fresh_state)
        arguments = {
            "directory": str(self.directory),
            "manifest": digest,
            "train_config": config,
            "with_state": with_state,
            "fresh_state": fresh_state,
            "strict": strict,
            "in_place": section.dump_id if section.in_place else None,
        }
        try:
            self._ask_all(Verb.LOAD, arguments)
            checked = self._await("checking", State.CHECKED)
            num_rows = sum(report.total_rows for report in checked)
            if num_rows != section.num_rows:
                raise CorruptionError(
                    f"the servers found {num_rows} rows in {self.directory}, its manifest says "
                    f"{section.num_rows}"
                )
            self._report_slot_changes(checked)
        except BaseException:
            self.cancel()
            raise
        return section

    def _check_section(
        self, section: EmbeddingSection, config: str | None, *, with_state: bool, fresh_state: bool
    ) -> None:
        """Checks that the rows can be loaded as they are asked for."""
        if section.in_place and (fresh_state or not with_state):
            raise InvalidArgumentError(
                f"the rows of {self.directory} are in the servers' pools, where they keep the optimizer's "
                "state: with_state=False (--without-state) is for checkpoints in files; dump to files, and "
                "load those"
            )
        if config is None and not section.in_place:
            raise FailedPreconditionError(
                f"{self.directory} was dumped before the servers had an optimizer, and has no rows to load"
            )
        if with_state and not fresh_state and not section.has_state:
            raise FailedPreconditionError(
                f"{self.directory} was dumped without the optimizer's state: to train on with the state of "
                "new rows, load its embeddings with with_state=False (--without-state)"
            )

    def apply(self) -> None:
        """Replaces the rows, after `check`."""
        try:
            self._ask_all(Verb.APPLY)
            self._await("loading", State.DONE)
        except PersiaError as failure:
            raise type(failure)(
                f"{failure}; other servers may have replaced their rows already: load again before going on"
            ) from failure

    def _report_slot_changes(self, reports: Sequence[Report]) -> None:
        """Warns of changed slots that strict=False has accepted: they may be a mistake."""
        changes = {(report.result or {}).get("slot_changes") or None for report in reports}
        for change in changes - {None}:
            get_default_logger().warning(
                "%.500s since %s was written: added slots begin empty, rows of removed ones stay until they "
                "are evicted",
                change,
                self.directory,
            )


def check_visible(directory: Location, files: Sequence[FileEntry]) -> None:
    """Checks that what servers wrote is visible from here: they may have other disks."""
    for file in files:
        path = directory / file.path
        try:
            num_bytes = path.size()
        except NotFoundError as failure:
            raise StorageError(
                f"{path} was written and is not there for this process: servers and NN workers need one "
                "directory, on a shared file system or in a storage service"
            ) from failure
        if num_bytes != file.num_bytes:
            raise StorageError(f"{path} has {num_bytes} bytes, {file.num_bytes} were written: dump again")


def agreed(results: Sequence[dict[str, Any]], key: str, peers: Sequence[Peer]) -> Any:
    """The value of `key` that all servers with one agree on."""
    known = [(peer, r[key]) for peer, r in zip(peers, results, strict=True) if r.get(key) is not None]
    for peer, value in known:
        if value != known[0][1]:
            raise FailedPreconditionError(
                f"{known[0][0]} and {peer} have a different {key}: start them alike"
            )
    return known[0][1] if known else None
