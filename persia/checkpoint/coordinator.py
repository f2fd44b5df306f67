"""Dumps and loads over all servers of a job, from the first request to the last report."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from persia.checkpoint.operation import Operation, check_visible
from persia.checkpoint.peers import Peer
from persia.checkpoint.protocol import IN_PLACE_NAME, Report, Request, State, Verb
from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PersiaError,
    StorageError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.pipeline.position import DataPosition
from persia.storage.checksummed_json import encode_pointer
from persia.storage.location import Location
from persia.storage.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    EmbeddingSection,
    Manifest,
    check_file_name,
    utc_now,
)
from persia.storage.position import Position
from persia.storage.signature import Signature
from persia.storage.signing import signer
from persia.storage.versions import is_latest, latest_of, version_name
from persia.validation import read_document

# Must be far below a server's lease, as one lost answer must not end the dump.
_KEEP_ALIVE_S = 5.0


@dataclass(frozen=True)
class DumpRequest:
    """The content of a dump. It replaces the parts of `url` that it has; another part of `url` stays."""

    url: Any  # directory of the checkpoint; with `keep_last` a directory of checkpoints (versions.py)
    _: KW_ONLY
    dense: Mapping[str, bytes] = field(default_factory=dict)  # torch files by name
    signature: Signature | None = None  # of the dense model's inputs
    embeddings: bool = True  # all rows
    step: int | None = None  # of the training loop
    trained: DataPosition | None = None  # at that step
    keep_last: int | None = None  # how many checkpoints stay
    optimizer: dict[str, Any] | None = None  # settings of the embedding optimizer, for people
    keep_small_rows: bool = False  # those below their slot's min_norm, which are removed first otherwise
    with_state: bool = True  # of the optimizer
    in_place: bool = False  # rows stay in the servers' tiers, which go back to this checkpoint from then on
    # False: the dump returns once every server has its snapshot, so that training may continue; an error is
    # raised by `Checkpoints.wait_for_dump`.
    blocking: bool = True
    # Called instead of raising what another try may not meet; None: it is raised.
    on_failure: Callable[[PersiaError], None] | None = None

    def __post_init__(self) -> None:
        if self.in_place and not self.with_state:
            raise InvalidArgumentError("in_place=True keeps rows whole: it cannot be with with_state=False")
        if self.keep_last is not None and self.keep_last < 1:
            raise InvalidArgumentError(f"keep_last={self.keep_last} must be at least 1")
        if self.keep_last is not None and self.step is None:
            raise InvalidArgumentError("keep_last needs the step, which names the checkpoint: give step=...")
        for name in self.dense:
            check_file_name(name)

    @property
    def directory(self) -> Location:
        """The directory of the manifest."""
        root = Location.of(self.url)
        return root if self.keep_last is None or self.step is None else root / version_name(self.step)


@dataclass
class DumpOperation(Operation):
    """Writes the rows of all servers into the folder `operation` of `directory`."""

    request: DumpRequest = field(kw_only=True)
    _decision: threading.Lock = field(default_factory=threading.Lock, init=False)
    _given_up: bool = field(default=False, init=False)
    _is_committed: bool = field(default=False, init=False)  # by its manifest
    # Whether the manifest alone does not commit it: `latest`, beside its directory, must name that as well.
    _needs_latest: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.directory = self.request.directory
        self.in_place = self.request.in_place and self.request.embeddings

    def begin(self) -> None:
        """Returns when every server has taken its snapshot: training may continue."""
        # Before anything is asked: a dump that cannot be must not make servers take snapshots.
        self._require_shared(self.directory, "")
        is_version = self.request.keep_last is not None
        try:
            self._needs_latest = self.in_place and is_version and not is_latest(self.directory)
            if self.in_place:
                # Servers look for it: the manifest in this directory will tell them whether to commit, so all
                # of them must see it.
                with self._marker.create() as marker:
                    marker.write(self.operation.encode())
            arguments = {
                "directory": str(self.directory),
                "needs_latest": self._needs_latest,
                "keep_small_rows": self.request.keep_small_rows,
                "with_state": self.request.with_state,
                "with_pages": signer() is not None,
                "in_place": self.in_place,
                "step": self.request.step,
            }
            # Each server answers once it has its snapshot. Updates that come later are not in the checkpoint.
            self.ask_all(Verb.DUMP, arguments)
        except BaseException:  # also an interrupt: a server would hold its snapshot until its lease ends
            self.give_up()
            raise

    @contextlib.contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Polls during the block, as the leases on the servers would end while files are written here."""
        if not self.peers:
            yield
            return
        over = threading.Event()

        def ask() -> None:
            while not over.wait(_KEEP_ALIVE_S):
                with contextlib.suppress(PersiaError):  # the wait for the servers finds what is wrong
                    self.ask_all(Verb.POLL)

        thread = threading.Thread(target=ask, name=f"persia-{self.operation}-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def finish(self, packets: Position | None = None) -> EmbeddingSection:
        """Waits until all is written. `packets`: the last one with a snapshot point before `begin`."""
        reports = self._await("writing", State.CHECKED if self.in_place else State.DONE)
        results = [report.result or {} for report in reports]
        values = {
            **self._rows(results),
            "dump_id": self.operation,
            "created_at": utc_now(),
            "train_config": self._agreed(results, "train_config"),
            "optimizer": self.request.optimizer,
            "has_state": self.request.with_state,
            "in_place": self.in_place,
        }
        section = read_document(EmbeddingSection, values, f"the report of {self.operation}")
        # Before the manifest is written: it may replace a checkpoint that is readable.
        check_visible(self.directory, section.files)
        return replace(section, packets=packets)

    def cancel(self) -> None:
        """As `Operation.cancel`, unless the manifest names the rows already: servers must commit those."""
        with self._decision:
            if self._is_committed:
                return
            self._given_up = True
        super().cancel()

    @property
    def _marker(self) -> Location:
        return self.directory / self.operation / IN_PLACE_NAME

    def publish(self, manifest: bytes) -> None:
        """Commits the dump, after `finish`. An error gives it up and keeps the checkpoint before it.

        FailedPreconditionError, UnavailableError: it was given up before, by this process or by a server.
        """
        try:
            # Under the lock: a `cancel` on another thread must not remove files that the manifest then names.
            with self._decision:
                if self._given_up:
                    raise FailedPreconditionError(f"{self.operation} was cancelled: dump again")
                if self.in_place:
                    self._publish_in_place(manifest)
                else:
                    (self.directory / MANIFEST_NAME).replace(manifest)
                self._is_committed = True
        except (FailedPreconditionError, UnavailableError):
            self.give_up()
            raise
        except StorageError as failure:
            # A storage service that did not answer may still store the manifest, whose files must exist then.
            # If it does not, the next dump removes them.
            if self.directory.is_local:
                self.give_up()
            raise StorageError(f"{failure}; the checkpoint before this dump is unchanged") from failure

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
                f"a server has given {self.operation} up: it has restarted, or this process was silent for "
                "longer than its lease; dump again"
            ) from failure

    def _publish_by_latest(self, target: Location, manifest: bytes) -> None:
        """Publishes by `latest`, once the manifest exists. After an error the old manifest is back."""
        # Readers of this directory take its manifest whatever `latest` says: a failure must restore the old.
        before = target.read_replaced(max_bytes=MAX_MANIFEST_BYTES) if target.exists_replaced() else None
        target.replace(manifest)
        try:
            self._marker.turn_into(latest_of(self.directory), encode_pointer(self.directory.name))
        except PersiaError as failure:
            # A storage service may have done what it reports as failed. Then `latest` names this directory,
            # and the old manifest in it would not fit the rows.
            if isinstance(failure, NotFoundError) or self.directory.is_local:
                if before is None:
                    target.remove_quietly()
                else:
                    target.replace(before)
            raise

    def commit(self) -> None:
        """Has servers commit rows in place, after `publish`. Raises the first error once all were asked: each
        server that commits can restart from this checkpoint, whatever happens to the others.
        """
        self.progress_at = time.monotonic()  # a commit moves no bytes, and must not look like a stall
        # Collected, not raised at once: `_on_all` raises without waiting for the other servers.
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
        verb = Verb.APPLY
        try:
            for _ in self._polls():
                report = self._ask(peer, Request(verb=verb, operation=self.operation))
                if report.state in (State.DONE, State.FAILED):
                    break
                verb = Verb.POLL
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

    def _require_known(self, peer: Peer, failure: UnavailableError) -> None:
        """A lost server finds out at its next start that the checkpoint is committed. UnavailableError: on
        storage without an atomic rename, it may have removed the marker before the manifest was stored."""
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
        section = manifest.require_embeddings(self.directory)
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
        # Nothing is replaced before every server has checked its rows: a damaged file must not leave a job
        # with the rows of two checkpoints.
        try:
            self.ask_all(Verb.LOAD, arguments)
            checked = self._await("checking", State.CHECKED)
            num_rows = sum(report.total_rows for report in checked)
            # Each server checks its share of the virtual shards. Only their sum shows that none was left out.
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
                f"the rows of {self.directory} are in the servers' storage tiers, which keep the optimizer's "
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
            self.ask_all(Verb.APPLY)
            self._await("loading", State.DONE)
        # Nothing is cancelled: a server that has begun to replace its rows must finish, whatever others do.
        except PersiaError as failure:
            raise type(failure)(
                f"{failure}; other servers may have replaced their rows already: load again before you train"
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
