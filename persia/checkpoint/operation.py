"""The base of all operations: the same question to every server of a job, repeated and judged.

Servers work by themselves. A coordinator polls them, which also keeps the operation alive. Every wait has a
deadline: an error names the server that does not answer or makes no progress.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from persia.checkpoint.peers import Peer
from persia.checkpoint.progress import Progress, ProgressCallback
from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PersiaError,
    ResourceExhaustedError,
    StorageError,
    UnavailableError,
)
from persia.messaging.daemon_pool import DaemonPool
from persia.storage.location import Location
from persia.storage.manifest import FileEntry
from persia.waiting import Attempts

_CALL_TIMEOUT_S = 10.0
# A server that has taken part in an operation and is silent for so long is considered dead: after a restart
# it knows nothing of the operation.
_SILENCE_S = 30.0
_FIRST_POLL_S = 0.02
_LONGEST_POLL_S = 1.0
_RETRY_S = 0.25
_MAX_PARALLEL_CALLS = 32  # threads of the coordinator, which may be the process that trains


class ServersReplacedError(UnavailableError):
    """Another number of servers has taken over: the operation must begin anew, with those."""


@dataclass
class Operation:
    """Asks all servers the same question, repeats it, and judges the answers."""

    operation: str
    peers: Sequence[Peer]
    deadline_s: float  # without an answer, or without progress
    on_progress: ProgressCallback = lambda _: None  # called on the thread that waits for the servers
    progress_at: float = field(default=0.0, init=False)  # `time.monotonic()` when the last byte was moved

    def cancel(self) -> None:
        """Cancels the operation on every server."""

        def cancel(peer: Peer) -> None:
            # A server that cannot be reached ends it by its lease. The error that led here is more useful.
            with contextlib.suppress(PersiaError):
                peer.call(Request(verb=Verb.CANCEL, operation=self.operation), _CALL_TIMEOUT_S)

        self._on_all(cancel)

    def ask_all(self, verb: Verb, arguments: dict[str, Any] | None = None) -> list[Report]:
        """The answers of all servers, by index. UnavailableError names a server that does not answer."""
        request = Request(verb=verb, operation=self.operation, arguments=arguments or {})
        reports: list[Report] = self._on_all(lambda peer: self._ask(peer, request))
        return reports

    def _await(self, phase: str, wanted: State) -> list[Report]:
        """Polls until every server is in the state `wanted`; raises the first failure of one."""
        last_done = (-1, -1)
        polls = self._polls()
        behind: list[str] = []
        for _ in polls:
            reports = self.ask_all(Verb.POLL)
            for peer, report in zip(self.peers, reports, strict=True):
                if report.error is not None:
                    raise type(report.error)(f"{peer}: {report.error}")
            done = sum(report.done_bytes for report in reports), sum(report.done_rows for report in reports)
            # Any movement of any server counts: a slow storage is no failure, a stalled one is.
            if done != last_done:
                last_done, self.progress_at = done, time.monotonic()
                polls.progressed()
            self.on_progress(Progress(phase, *done, sum(report.total_rows for report in reports)))
            # After the errors above: a failed server never reaches the state wanted, and would be waited for.
            behind = [str(peer) for peer, r in zip(self.peers, reports, strict=True) if r.state is not wanted]
            if not behind:
                return reports
        raise DeadlineExceededError(
            f"{self.operation}: no byte was moved for {self.deadline_s:g} s (PERSIA_DEADLINE_SEC); "
            f"not done: {', '.join(behind)}"
        )

    def _polls(self) -> Attempts:
        return Attempts(self.deadline_s, pause_s=_FIRST_POLL_S, longest_pause_s=_LONGEST_POLL_S)

    def _ask(self, peer: Peer, request: Request) -> Report:
        """Repeats the request until it is answered; UnavailableError names a server that is silent.

        ServersReplacedError: the request begins a dump or a load, and the server is not the one it is for.
        """
        # Before its first answer a server may be busy with another operation, or still be starting.
        is_first = request.verb in (Verb.DUMP, Verb.LOAD)
        patience_s = self.deadline_s if is_first else min(self.deadline_s, _SILENCE_S)
        attempts = Attempts(patience_s, pause_s=_RETRY_S)
        last: PersiaError | None = None
        for _ in attempts:
            try:
                return peer.call(request, min(_CALL_TIMEOUT_S, max(attempts.left_s, 0.1)))
            except NotFoundError as failure:
                if is_first:  # the operation itself is new to every server
                    raise ServersReplacedError(f"{peer}: {failure}") from failure
                # A restarted server has lost its snapshot: repeating the request cannot help.
                raise UnavailableError(
                    f"{peer} has restarted during {self.operation}, which it no longer knows"
                ) from failure
            except (ResourceExhaustedError, UnavailableError, DeadlineExceededError) as failure:
                last = failure.with_traceback(None)  # whose frames hold this one, and perhaps a store
                # Changes can wait. To wait for them here would hold up this process' own dumps.
                if isinstance(failure, ResourceExhaustedError) and request.verb is Verb.TAKE:
                    break
            except PersiaError as failure:
                raise type(failure)(f"{peer}: {failure}") from failure
        if isinstance(last, ResourceExhaustedError):
            raise ResourceExhaustedError(f"{peer}: {last}") from last
        raise UnavailableError(
            f"{peer} has not answered for {patience_s:g} s during {self.operation}: {last}"
        ) from last

    def _on_all(self, function: Callable[[Peer], Any]) -> list[Any]:
        """Calls `function` with every peer in parallel; it must end by itself. Raises the first error."""
        if len(self.peers) == 1:  # polls are frequent: no thread for a single server
            return [function(self.peers[0])]
        pool = DaemonPool(min(len(self.peers), _MAX_PARALLEL_CALLS), f"persia-{self.operation}")
        try:
            return [future.result() for future in [pool.submit(function, peer) for peer in self.peers]]
        finally:
            pool.close()  # calls under way end by themselves: the error must not wait for them

    def _require_shared(self, directory: Location, what: str) -> None:
        """Raises InvalidArgumentError where servers in other processes cannot see `directory`."""
        if directory.is_of_this_process and any(peer.is_remote for peer in self.peers):
            raise InvalidArgumentError(
                f"{what}{directory} exists in this process only, and the rows are in others: use a directory "
                "or storage service that all reach"
            )

    def _rows(self, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The keys of a manifest that the servers report; the manifest's own reader judges them."""
        return {
            "schema": self._agreed(results, "schema"),
            "servers": results,
            "files": [file for result in results for file in result.get("files", ())],
        }

    def _agreed(self, results: Sequence[dict[str, Any]], key: str) -> Any:
        """The value of `key` that all servers with one agree on."""
        known = [
            (peer, r[key]) for peer, r in zip(self.peers, results, strict=True) if r.get(key) is not None
        ]
        for peer, value in known:
            if value != known[0][1]:
                raise FailedPreconditionError(
                    f"{known[0][0]} and {peer} have a different {key}: start them alike"
                )
        return known[0][1] if known else None


def check_visible(directory: Location, files: Sequence[FileEntry]) -> None:
    """Checks that what servers wrote is visible from here: they may have other disks."""
    # By size only. The checksums are of what the servers read back from the storage.
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
