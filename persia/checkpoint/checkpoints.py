"""Dumps and loads as contexts use them: what is asked for, in the foreground or behind training's back."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from persia.checkpoint.coordinator import DumpOperation, LoadOperation
from persia.checkpoint.peers import Peer
from persia.checkpoint.progress import ShownProgress, megabytes
from persia.embedding.optim import Optimizer
from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.storage.location import Location
from persia.storage.manifest import (
    DenseSection,
    EmbeddingSection,
    FileEntry,
    Manifest,
    check_file_name,
    is_dump_id,
    make_dump_id,
    utc_now,
)
from persia.storage.position import Position
from persia.storage.versions import keep_newest, resolve, set_latest, version_name

__all__ = ["ChangeFeed", "Checkpoints", "Source", "described"]

_MAX_DENSE_BYTES = 1 << 40  # a bound for what is read at once; the manifest has the size


class Source:
    """A checkpoint to load from: a directory, or a directory of checkpoints with its `latest`.

    One without a manifest may still have plain files, as `dump_torch_state_dict` writes them.
    """

    def __init__(self, url: Any) -> None:
        self.location = Location.of(url)
        self.manifest = Manifest()
        with contextlib.suppress(NotFoundError):
            self.location = resolve(self.location)
            self.manifest, _ = Manifest.read(self.location)

    @property
    def has_embeddings(self) -> bool:
        return self.manifest.embeddings is not None

    def dense(self, name: str) -> bytes:
        """The content of the torch file `name`, as it was dumped. NotFoundError, CorruptionError."""
        files = {} if self.manifest.dense is None else self.manifest.dense.files
        entry = files.get(name)
        path = self.location / (name if entry is None else entry.path)
        try:
            content = path.read(max_bytes=_MAX_DENSE_BYTES)
        except NotFoundError as failure:
            raise NotFoundError(
                f"{self.location / name} does not exist: check the checkpoint's directory and file name"
            ) from failure
        if entry is not None and hashlib.sha256(content).hexdigest() != entry.checksum:
            raise CorruptionError(
                f"{path} is damaged: its checksum is not the manifest's ({len(content)} bytes, "
                f"{entry.num_bytes} were written)"
            )
        return content


@dataclass
class _Background:
    """A dump or load on a thread of its own."""

    work: Callable[[], None]
    name: str
    progress: ShownProgress

    def __post_init__(self) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it has ended; raises its error. The operation has deadlines of its own."""
        with self.progress.bar() if self._thread.is_alive() else contextlib.nullcontext():
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as failure:
            self._error = failure


class ChangeFeed(Protocol):
    """What writes packets of changes beside dumps and loads: a server does one of them at a time."""

    def pause(self) -> Position | None:
        """Until no packet is under way, and then none is begun. The last one; None: there are none."""

    def resume(self) -> None:
        """After `pause`, on any thread."""

    def dumped(self, target: Location, section: EmbeddingSection, *, has_dense: bool) -> None:
        """There are all rows of a checkpoint, and perhaps its dense model with them. While paused."""

    def loaded(self, section: EmbeddingSection, *, may_have_changed: bool) -> None:
        """All rows were replaced, and perhaps updated since: training did not wait. While paused."""


class Checkpoints:
    """Of one job, from the process that coordinates them. Not thread-safe."""

    def __init__(self, find_peers: Callable[[], Sequence[Peer]], *, deadline_s: float) -> None:
        """`find_peers`: all servers, by index. `deadline_s`: without an answer, or without progress."""
        self._find_peers = find_peers
        self._deadline_s = deadline_s
        self.feed: ChangeFeed | None = None
        self._dump: _Background | None = None
        self._load: _Background | None = None
        self._running: DumpOperation | LoadOperation | None = None

    @property
    def progress_at(self) -> float:
        """`time.monotonic()` when the last dump or load moved its last byte so far."""
        return float("-inf") if self._running is None else self._running.progress_at

    def dump(
        self,
        url: Any,
        *,
        dense: Mapping[str, bytes] | None = None,
        embeddings: bool = True,
        step: int | None = None,
        keep_last: int | None = None,
        optimizer: dict[str, Any] | None = None,
        keep_small_rows: bool = False,
        with_state: bool = True,
        in_place: bool = False,
        blocking: bool = True,
    ) -> None:
        """Writes `dense` files and all rows; what `url` had of either is replaced, the rest stays.
        Rows below their slot's min_norm are removed first, unless `keep_small_rows` or `in_place`. Without
        `with_state` the optimizer's state is left out.

        Without `blocking` it returns once every server has its snapshot, so that training may go on; an error
        is raised by `wait_for_dump`. With `keep_last`, `url` is a directory of checkpoints (versions.py).
        With `in_place` rows stay in the servers' pools, which go back to this checkpoint once it is complete.
        """
        if in_place and not with_state:
            raise InvalidArgumentError("in_place=True keeps rows whole: it cannot be with with_state=False")
        self.wait_for_dump()
        self.wait_for_load()
        target = _target(Location.of(url), step, keep_last)
        for name in dense or ():
            check_file_name(name)
        operation = DumpOperation(
            make_dump_id(),
            self._find_peers() if embeddings else (),
            self._deadline_s,
            directory=target,
            keep_small_rows=keep_small_rows,
            with_state=with_state,
            in_place=in_place and embeddings,
            is_version=keep_last is not None,
            step=step,
        )
        operation.on_progress = progress = ShownProgress(f"dumping to {target}")
        position = None if self.feed is None else self.feed.pause()
        try:
            if embeddings:
                operation.begin()
        except BaseException:
            self._resume_feed()
            raise
        self._running = operation
        work = functools.partial(self._finish_dump, operation, dense, step, keep_last, optimizer, position)
        if blocking:
            with progress.bar():
                work()
        else:
            self._dump = _Background(work, "persia-dump", progress)

    def load(
        self,
        source: Source,
        *,
        train_config: bytes | None = None,
        with_state: bool = True,
        fresh_state: bool = False,
        strict: bool = True,
        blocking: bool = True,
    ) -> None:
        """Replaces all rows by those of `source`, after every server has checked everything. Arguments are
        those of `LoadOperation.check`.

        An error leaves rows as they were, unless it says otherwise. Without `blocking` it returns once all
        is checked, and the rows are replaced behind the script's back; `wait_for_load` raises what fails
        then.
        """
        self.wait_for_dump()
        self.wait_for_load()

        operation = LoadOperation(
            make_dump_id().replace("dump", "load", 1),
            self._find_peers(),
            self._deadline_s,
            directory=source.location,
        )
        operation.on_progress = progress = ShownProgress(f"loading {source.location}")
        self._running = operation
        started = time.monotonic()
        with progress.bar():  # checking is waited for in any case
            with contextlib.ExitStack() as until_loaded:
                until_loaded.enter_context(self._paused_feed())
                section = operation.check(
                    train_config=train_config, with_state=with_state, fresh_state=fresh_state, strict=strict
                )
                work = functools.partial(
                    self._finish_load, operation, section, until_loaded.pop_all(), started, blocking=blocking
                )
            if blocking:
                work()
                return
        self._load = _Background(work, "persia-load", progress)

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
            if self.feed is not None:
                # Followers can load no rows that are in place: they need another checkpoint to begin with.
                self.feed.loaded(section, may_have_changed=not blocking or section.in_place)
        get_default_logger().info(
            "loaded %d rows, %s, from %s in %.1f s",
            section.num_rows,
            megabytes(section.num_bytes),
            operation.directory,
            time.monotonic() - started,
        )

    def _resume_feed(self) -> None:
        if self.feed is not None:
            self.feed.resume()

    @contextlib.contextmanager
    def _paused_feed(self) -> Iterator[None]:
        if self.feed is not None:
            self.feed.pause()
        try:
            yield
        finally:
            self._resume_feed()

    def wait_for_dump(self) -> None:
        """Until the dump behind training's back is complete; raises its error, once."""
        dump, self._dump = self._dump, None
        if dump is not None:
            dump.wait()

    def wait_for_load(self) -> None:
        """Until the load behind the script's back is complete; raises its error, once."""
        load, self._load = self._load, None
        if load is not None:
            load.wait()

    def close(self, *, finish: bool) -> None:
        """Waits for what still runs, or ends it."""
        if not finish and self._running is not None and (self._dump or self._load):
            self._running.cancel()
        self.wait_for_dump()
        self.wait_for_load()

    def _finish_dump(
        self,
        operation: DumpOperation,
        dense: Mapping[str, bytes] | None,
        step: int | None,
        keep_last: int | None,
        optimizer: dict[str, Any] | None,
        position: Position | None,
    ) -> None:
        started = time.monotonic()
        target = operation.directory
        try:
            with operation.kept_alive():
                with _given_up_on_error(operation):
                    dense_section = _write_dense(target, operation.operation, dense) if dense else None
                    section = operation.finish(optimizer, position) if operation.peers else None
                    old, new = _merged(target, step, dense_section, section)
                _publish(operation, new)
            if operation.in_place:  # it is the latest since it counts
                operation.commit()
            elif keep_last is not None:
                set_latest(target.parent, target.name)
            if section is not None and not section.in_place and self.feed is not None:
                self.feed.dumped(target, section, has_dense=dense_section is not None)
        finally:
            self._resume_feed()
        # The new checkpoint is complete; what follows only tidies up.
        for name, entry in ({} if dense_section is None else dense_section.files).items():
            (target / entry.path).link(target / name)
        _remove_old_dumps(target, old, new, operation.operation)
        if keep_last is not None:
            keep_newest(target.parent, target.name, keep_last)
        num_rows = 0 if section is None else section.num_rows
        num_bytes = sum(len(content) for content in (dense or {}).values())
        num_bytes += 0 if section is None else section.num_bytes
        get_default_logger().info(
            "dumped %d rows, %s, to %s in %.1f s",
            num_rows,
            megabytes(num_bytes),
            target,
            time.monotonic() - started,
        )


@contextlib.contextmanager
def _given_up_on_error(operation: DumpOperation) -> Iterator[None]:
    try:
        yield
    except BaseException:
        operation.give_up()
        raise


def _publish(operation: DumpOperation, manifest: Manifest) -> None:
    """Makes what was dumped the checkpoint. StorageError: the old one is there, as far as can be seen."""
    try:
        operation.publish(manifest.encode())
    except (FailedPreconditionError, UnavailableError):
        operation.give_up()
        raise
    except StorageError as failure:
        # A service that did not answer may bring the manifest later, whose files must be there then. Of what
        # stays behind in vain the next dump is rid.
        if operation.directory.is_local:
            operation.give_up()
        raise StorageError(f"{failure}; what was there before is what counts") from failure


def described(optimizer: Optimizer) -> dict[str, Any]:
    """An embedding optimizer's settings, for people who read the manifest."""
    settings = {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    return {"name": type(optimizer).__name__, **settings}


def _target(location: Location, step: int | None, keep_last: int | None) -> Location:
    if keep_last is None:
        return location
    if keep_last < 1:
        raise InvalidArgumentError(f"keep_last={keep_last} must be at least 1")
    if step is None:
        raise InvalidArgumentError("keep_last needs the step, which names the checkpoint: give step=...")
    return location / version_name(step)


def _write_dense(target: Location, dump_id: str, dense: Mapping[str, bytes]) -> DenseSection:
    files = {}
    for name, content in dense.items():
        path = f"{dump_id}/{name}"
        with (target / path).create() as sink:
            sink.write(content)
        checksum = hashlib.sha256(content).hexdigest()
        files[name] = FileEntry(path=path, num_bytes=len(content), checksum=checksum)
    return DenseSection(dump_id=dump_id, created_at=utc_now(), files=files)


def _merged(
    target: Location, step: int | None, dense: DenseSection | None, section: Any
) -> tuple[Manifest, Manifest]:
    """The manifest that is there, and the one that replaces it."""
    try:
        old, _ = Manifest.read(target)
    except NotFoundError:
        old = Manifest()
    except CorruptionError as failure:
        if dense is None or section is None:
            raise FailedPreconditionError(
                f"a part of what {target} holds would stay, and it cannot be read ({failure}): dump to "
                "another directory"
            ) from failure
        old = Manifest()
    return old, old.updated(step, dense, section)


def _remove_old_dumps(target: Location, old: Manifest, new: Manifest, dump_id: str) -> None:
    """Files and folders that the manifest no longer names, and what dumps that broke off have left."""
    for path in sorted(old.paths - new.paths):
        (target / path).remove_quietly()
    stale = set(old.dump_ids)
    stale.update(child.name for child in target.children() if is_dump_id(child.name) and child.name < dump_id)
    for name in sorted(stale - new.dump_ids):
        (target / name).remove_quietly()
