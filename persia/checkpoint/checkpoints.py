"""Dumps and loads as contexts use them, in the foreground or in the background.

In: a `DumpRequest`, or a `Source` to load from. Out: a checkpoint that is whole or does not exist, or rows
that are all replaced or none. The servers write and read the rows (server_job.py); here are the order of the
steps and the files of the process that trains.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from persia.checkpoint.coordinator import DumpOperation, DumpRequest, LoadOperation
from persia.checkpoint.operation import ServersReplacedError
from persia.checkpoint.peers import Peer
from persia.checkpoint.progress import ShownProgress, megabytes
from persia.embedding.optim import Optimizer
from persia.errors import (
    CorruptionError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    StorageError,
    UnavailableError,
    UntrustedError,
)
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool
from persia.storage.location import Location
from persia.storage.manifest import (
    DenseSection,
    EmbeddingSection,
    Manifest,
    is_dump_id,
    make_dump_id,
    utc_now,
)
from persia.storage.position import Position
from persia.storage.shard_file import write_files
from persia.storage.signature import Signature
from persia.storage.signing import signer, trusted_keys
from persia.storage.versions import keep_newest, resolve, set_latest

__all__ = ["EXTRA_NAME", "Checkpoints", "DumpHook", "DumpRequest", "Source", "described", "newest_of"]

_T = TypeVar("_T")

EXTRA_NAME = "extra.pt"  # among the dense files: it is written and committed with them
_MAX_BEGINNINGS = 5  # each change of the number of servers takes seconds at least
_MAX_DENSE_BYTES = 1 << 40  # a bound for what is read at once; the manifest has the size


class Source:
    """A checkpoint to load from: a directory, or a directory of checkpoints with its `latest`.

    One without a manifest may still have plain files, as `dump_torch_state_dict` writes them.
    """

    def __init__(self, url: Any) -> None:
        self.location = Location.of(url)
        self.manifest = Manifest()
        # No manifest is no error here: `dense` also reads plain torch files of that directory.
        with contextlib.suppress(NotFoundError):
            self.location = resolve(self.location)
            self.manifest, _ = Manifest.read(self.location)

    @property
    def has_embeddings(self) -> bool:
        return self.manifest.embeddings is not None

    @property
    def signature(self) -> Signature | None:
        """The features that its dense model was trained with; None: it does not tell."""
        return None if self.manifest.dense is None else self.manifest.dense.signature

    def extra(self) -> Any:
        """The state of the script that was dumped with it; None: there is none."""
        if self.manifest.dense is None or EXTRA_NAME not in self.manifest.dense.files:
            return None
        from persia.storage.dense import load_extra  # torch, which servers do not load

        return load_extra(self.dense(EXTRA_NAME), str(self.location / EXTRA_NAME))

    def check_position(self, remedy: str) -> None:
        """FailedPreconditionError: it does not say which batches are trained, which ends with `remedy`."""
        if self.manifest.trained is None and self.manifest.step:
            raise FailedPreconditionError(
                f"{self.location} does not say which batches its {self.manifest.step} steps have trained, as "
                f"a rank did not answer when it was written, so all data would be trained again: {remedy}"
            )

    def dense(self, name: str, read: Callable[..., bytes] = Location.read) -> bytes:
        """The content of the torch file `name`, as it was dumped. NotFoundError, CorruptionError.

        UntrustedError: signatures are checked, and no signed manifest names it.
        """
        files = {} if self.manifest.dense is None else self.manifest.dense.files
        entry = files.get(name)
        path = self.location / (name if entry is None else entry.path)
        try:
            content = read(path, max_bytes=_MAX_DENSE_BYTES)
        except NotFoundError as failure:
            raise NotFoundError(
                f"{self.location / name} does not exist: check the checkpoint's directory and file name"
            ) from failure
        if entry is None and (keys := trusted_keys()) is not None:
            raise UntrustedError(
                f"{path} is named by no manifest that {' or '.join(keys.files.values())} has signed: load a "
                "checkpoint that was dumped with --sign-key (PERSIA_SIGN_KEY)"
            )
        if entry is not None and hashlib.sha256(content).hexdigest() != entry.checksum:
            raise CorruptionError(
                f"{path} is damaged: its checksum is not the manifest's ({len(content)} bytes, "
                f"{entry.num_bytes} were written)"
            )
        return content


def newest_of(locations: Sequence[Location]) -> Source | None:
    """The checkpoint of the latest step among `locations`; None: there is none.

    One that does not say which batches are trained is only taken if there is no other.
    """
    found = [source for source in map(Source, locations) if source.manifest.step is not None]

    def key(source: Source) -> tuple[bool, int]:
        return source.manifest.trained is not None, source.manifest.step or 0

    return max(found, key=key, default=None)


class DumpHook:
    """Work that must pause for dumps and loads, as a server does one operation at a time.

    This one does nothing; `persia.packets` writes packets between dumps.
    """

    def pause(self) -> Position | None:
        """Waits for the operation under way, and begins no other. Returns the last packet, if any."""
        return None

    def resume(self) -> None:
        """Ends a pause, on any thread."""

    def dumped(self, directory: Location, section: EmbeddingSection, *, has_dense: bool) -> None:
        """Called while paused: a checkpoint has all rows in files, and the dense model if `has_dense`."""

    def loaded(self, section: EmbeddingSection, *, may_have_changed: bool) -> None:
        """Called while paused: all rows were replaced, and may have been updated since."""


class Checkpoints:
    """Dumps and loads of one job, from the process that coordinates them. Not thread-safe."""

    def __init__(self, find_peers: Callable[[], Sequence[Peer]], *, deadline_s: float) -> None:
        """`find_peers` returns all servers by index. `deadline_s`: without an answer, or without progress."""
        self._find_peers = find_peers
        self._deadline_s = deadline_s
        self.hook = DumpHook()
        self._operation: DumpOperation | LoadOperation | None = None  # the last one
        self._progress = ShownProgress("")  # of that operation
        # Of that operation, when it runs in the background, until its caller has waited for it.
        self._result: Future[None] | None = None
        self._thread = DaemonPool(1, "persia-checkpoint")

    @property
    def progress_at(self) -> float:
        """`time.monotonic()` when the last dump or load moved its last byte so far."""
        return float("-inf") if self._operation is None else self._operation.progress_at

    def dump(self, request: DumpRequest) -> None:
        """Writes a checkpoint. StorageError, FailedPreconditionError, ...: the one before it is unchanged."""
        self._wait()
        with _reported(request):
            self._dump(request)

    def _dump(self, request: DumpRequest) -> None:
        operation, position, held = self._begin(lambda: self._begin_dump(request))

        def finish() -> None:
            with _reported(request):
                self._finish_dump(operation, position, held)

        self._run(finish, blocking=request.blocking)

    def _begin_dump(
        self, request: DumpRequest
    ) -> tuple[DumpOperation, Position | None, contextlib.ExitStack]:
        """Returns the operation, the last packet before it, and the pause until its rows are written."""
        peers = self._find_peers() if request.embeddings else ()
        operation = DumpOperation(make_dump_id(), peers, self._deadline_s, request=request)
        self._show(operation, f"dumping to {operation.directory}")
        # The hook stays paused until the rows are written: `pop_all` hands the pause to the writing thread.
        with contextlib.ExitStack() as until_written:
            position = self._pause_hook(until_written)
            if operation.peers:
                operation.begin()
            with contextlib.suppress(StorageError):  # `finish` reports it
                operation.directory.create_folder()  # a script may add files at once, before servers write
            return operation, position, until_written.pop_all()

    def _finish_dump(
        self, operation: DumpOperation, position: Position | None, until_written: contextlib.ExitStack
    ) -> None:
        request, started = operation.request, time.monotonic()
        with until_written:
            old, new = _write(operation, position)
            section = new.embeddings if operation.peers else None
            if section is not None and not section.in_place:
                self.hook.dumped(operation.directory, section, has_dense=bool(request.dense))
        # The new checkpoint is committed: from here on, files that it does not need may be removed.
        if request.dense and new.dense is not None:
            for name, entry in new.dense.files.items():
                (operation.directory / entry.path).link(operation.directory / name)
        _remove_old_dumps(operation.directory, old, new, operation.operation)
        if request.keep_last is not None:
            keep_newest(operation.directory.parent, operation.directory.name, request.keep_last)
        num_bytes = sum(len(content) for content in request.dense.values())
        get_default_logger().info(
            "dumped %d rows, %s, to %s in %.1f s",
            0 if section is None else section.num_rows,
            megabytes(num_bytes + (0 if section is None else section.num_bytes)),
            operation.directory,
            time.monotonic() - started,
        )

    def load(self, source: Source, *, blocking: bool = True, **options: Any) -> None:
        """Replaces all rows by those of `source`, after every server has checked everything. `options` are
        those of `LoadOperation.check`.

        An error leaves rows as they were, unless it says otherwise. Without `blocking` it returns once all
        is checked, and the rows are replaced in the background; `wait_for_load` raises what fails then.
        """
        self._wait()
        started = time.monotonic()
        # A load that does not block waits for the checks all the same.
        operation, section, held = self._begin(lambda: self._begin_load(source, options))
        work = functools.partial(self._finish_load, operation, section, held, started, blocking=blocking)
        self._run(work, blocking=blocking)

    def _begin_load(
        self, source: Source, options: dict[str, Any]
    ) -> tuple[LoadOperation, EmbeddingSection, contextlib.ExitStack]:
        name = make_dump_id().replace("dump", "load", 1)
        operation = LoadOperation(name, self._find_peers(), self._deadline_s, directory=source.location)
        self._show(operation, f"loading {source.location}")
        with self._progress.bar(), contextlib.ExitStack() as until_loaded:
            self._pause_hook(until_loaded)
            section = operation.check(**options)
            return operation, section, until_loaded.pop_all()

    def _finish_load(
        self,
        operation: LoadOperation,
        section: EmbeddingSection,
        until_loaded: contextlib.ExitStack,
        started: float,
        *,
        blocking: bool,
    ) -> None:
        with until_loaded:
            operation.apply()
            # Followers cannot load rows that are in place: they need another checkpoint to start from.
            self.hook.loaded(section, may_have_changed=not blocking or section.in_place)
        get_default_logger().info(
            "loaded %d rows, %s, from %s in %.1f s",
            section.num_rows,
            megabytes(section.num_bytes),
            operation.directory,
            time.monotonic() - started,
        )

    def _begin(self, begin: Callable[[], _T]) -> _T:
        """Begins anew when another number of servers has taken over since they were looked for (ADR 34)."""
        for _ in range(_MAX_BEGINNINGS):
            try:
                return begin()
            except ServersReplacedError as failure:
                get_default_logger().info("looking for the parameter servers again: %s", failure)
                last = str(failure)
        raise UnavailableError(f"the parameter servers were replaced {_MAX_BEGINNINGS} times: {last}")

    def _show(self, operation: DumpOperation | LoadOperation, title: str) -> None:
        self._operation, self._progress = operation, ShownProgress(title)
        operation.on_progress = self._progress  # called on the thread that waits for the servers

    def _pause_hook(self, until: contextlib.ExitStack) -> Position | None:
        """Pauses the hook until the end of `until`; returns the last packet before."""
        position = self.hook.pause()
        until.callback(self.hook.resume)
        return position

    def _run(self, work: Callable[[], None], *, blocking: bool) -> None:
        if blocking:
            with self._progress.bar():
                work()
        else:
            self._result = self._thread.submit(work)

    def wait_for_dump(self) -> None:
        """Returns once the dump in the background is complete; raises its error, once."""
        if isinstance(self._operation, DumpOperation):
            self._wait()

    @property
    def is_loading(self) -> bool:
        """A load in the background replaces rows."""
        result = self._result
        return isinstance(self._operation, LoadOperation) and result is not None and not result.done()

    def wait_for_load(self) -> None:
        """Returns once the load in the background is complete; raises its error, once."""
        if isinstance(self._operation, LoadOperation):
            self._wait()

    def _wait(self) -> None:
        """Waits for what runs in the background, if anything does.

        A server does one operation at a time, and an error of the last one must not be lost.
        """
        result, self._result = self._result, None
        if result is not None:
            with contextlib.nullcontext() if result.done() else self._progress.bar():
                result.result()  # without a deadline: the operation has its own

    def close(self, *, finish: bool) -> None:
        """Waits for the dump or load under way, or cancels it."""
        # An error ends the training: what it dumps in the background is not waited for.
        if not finish and self._operation is not None and self._result is not None:
            self._operation.cancel()
        try:
            self._wait()
        finally:
            self._thread.close()


@contextlib.contextmanager
def _reported(request: DumpRequest) -> Iterator[None]:
    """Reports what a later dump may not meet to `on_failure`, if there is one."""
    try:
        yield
    except (StorageError, ResourceExhaustedError, UnavailableError, DeadlineExceededError) as failure:
        if request.on_failure is None:
            raise
        request.on_failure(failure)


def _write(operation: DumpOperation, position: Position | None) -> tuple[Manifest, Manifest]:
    """Writes everything and commits the checkpoint. Returns the manifest before and the new one."""
    request, directory = operation.request, operation.directory
    with operation.kept_alive():
        try:
            dense = None
            # While servers write their rows, which takes longer.
            if request.dense:
                files = write_files(directory, operation.operation, request.dense)
                dense = DenseSection(
                    dump_id=operation.operation,
                    created_at=utc_now(),
                    files=files,
                    signature=request.signature,
                )
            section = operation.finish(position) if operation.peers else None
            # Read only now: another dump into the same directory may have ended meanwhile.
            old, new = _merged(request, dense, section)
        except BaseException:
            operation.give_up()
            raise
        operation.publish(new.encode(signer()))
    if operation.in_place:  # `latest` names it already: publish() has done that in the same step
        operation.commit()
    elif request.keep_last is not None:
        set_latest(directory.parent, directory.name)
    return old, new


def described(optimizer: Optimizer) -> dict[str, Any]:
    """An embedding optimizer's settings, for people who read the manifest."""
    settings = {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    return {"name": type(optimizer).__name__, **settings}


def _merged(request: DumpRequest, dense: DenseSection | None, section: Any) -> tuple[Manifest, Manifest]:
    """The manifest that is there, and the one that replaces it."""
    target = request.directory
    try:
        # What stays of it is signed again: the key must not vouch for what a stranger has put there.
        key = signer()
        old, _ = Manifest.read(target, None if key is None else key.keys)
    except NotFoundError:
        old = Manifest()
    except CorruptionError as failure:
        # A complete dump replaces a damaged manifest. A partial one would make its other section disappear.
        if dense is None or section is None:
            raise FailedPreconditionError(
                f"a part of what {target} holds would stay, and it cannot be read ({failure}): dump to "
                "another directory"
            ) from failure
        old = Manifest()
    return old, old.updated(request.step, dense, section, request.trained)


def _remove_old_dumps(target: Location, old: Manifest, new: Manifest, dump_id: str) -> None:
    """Removes files and folders that the manifest no longer names, and those of failed dumps."""
    # By name, not by age: dump ids sort by time, and a later dump of another process may be in progress.
    for path in sorted(old.paths - new.paths):
        (target / path).remove_quietly()
    stale = set(old.dump_ids)
    stale.update(child.name for child in target.children() if is_dump_id(child.name) and child.name < dump_id)
    for name in sorted(stale - new.dump_ids):
        (target / name).remove_quietly()
