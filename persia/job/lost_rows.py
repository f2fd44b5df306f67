"""Notices that a parameter server of the job has restarted without its rows, which training must not ignore.

Discovery tells the incarnations of the servers. One that changes is a restart: the rows of that server are
gone, unless it has recovered them from its storage tier.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from enum import Enum

from persia import env
from persia.errors import InvalidArgumentError, RowsLostError
from persia.logger import get_default_logger
from persia.messaging.discovery import Directory, EventKind, ServiceEvent, ServiceInfo
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER


class OnLostRows(Enum):
    """What a training does when rows are lost."""

    RAISE = "raise"  # the loop raises RowsLostError, and nothing is dumped
    RECOVER = "recover"  # that too, and the process ends, to continue after a checkpoint when it is restarted
    CONTINUE = "continue"  # the rows begin anew; logged as an error

    @classmethod
    def of(cls, value: OnLostRows | str) -> OnLostRows:
        """Raises InvalidArgumentError naming the choices."""
        try:
            return cls(value)
        except ValueError:
            choices = ", ".join(repr(rule.value) for rule in cls)
            raise InvalidArgumentError(f"on_lost_rows is {value!r}: choose one of {choices}") from None


class RollBack(SystemExit):
    """Raised by a context that leaves lost rows to its supervisor: the job must be started again.

    No Exception: a script that catches those must not end as if it had trained everything.
    """

    def __init__(self) -> None:
        super().__init__(os.EX_TEMPFAIL)


class RowsGuard:
    """Watches the parameter servers from creation to `close`. Thread-safe.

    `on_lost` is called on a thread of the session, once for each restart, when rows are lost.
    """

    def __init__(
        self, directory: Directory, rule: OnLostRows, on_lost: Callable[[RowsLostError], None]
    ) -> None:
        self._directory, self._rule, self._on_lost = directory, rule, on_lost
        # Written by events and by the thread that trains: single operations of a dict are atomic.
        self._servers: dict[int, ServiceInfo] = {}
        self._first: ServiceInfo | None = None  # that was seen
        self._lost: dict[int, ServiceInfo] = {}
        # The watch begins before the look: a restart between the two is seen by one of them.
        self._watch = directory.watch(EMBEDDING_PARAMETER_SERVER, self._on_event)
        self._look()

    def check(self) -> None:
        """Raises RowsLostError when rows are missing on a server."""
        self._look()  # the event of a restart may be on its way
        self.raise_known()

    def raise_known(self) -> None:
        """As `check`, without asking the servers."""
        for server in list(self._lost.values()):
            raise _error(server)

    def roll_back(self, directory: str | os.PathLike[str]) -> None:
        """With RECOVER, raises RollBack if rows are missing: the checkpoints of `directory` have them."""
        if self._rule is not OnLostRows.RECOVER or not self._lost:
            return
        get_default_logger().error(
            "rows are lost: this process ends with exit code %d. Once all ranks and data loaders are started "
            "again, the job continues after the newest checkpoint of %s",
            os.EX_TEMPFAIL,
            directory,
        )
        raise RollBack

    def missing(self) -> list[ServiceInfo]:
        """The servers without their rows, for `loaded` after a load that begins now."""
        self._look()
        return list(self._lost.values())

    def loaded(self, missing: Iterable[ServiceInfo]) -> None:
        """A load has replaced the rows of `missing`. Those of a server that restarted during it are lost."""
        self._look()
        for server in missing:
            # The same object, not the same index: a server that restarted while rows were loaded is another
            # entry, and its rows are lost again.
            if self._lost.get(server.index) is server:
                del self._lost[server.index]

    def close(self) -> None:
        self._watch.close()

    def _look(self) -> None:
        for server in self._directory.wait_for(EMBEDDING_PARAMETER_SERVER, env.get_deadline_s()):
            self._see(server)

    def _on_event(self, event: ServiceEvent) -> None:
        if event.kind is EventKind.JOINED:
            self._see(event.info)

    def _see(self, server: ServiceInfo) -> None:
        first = self._first = self._first or server
        # Of more servers than before: it should have rows of all those.
        unseen = first if first.generation < server.generation else server
        known = self._servers.get(server.index, unseen)
        if server.is_outranked_by(known):
            return
        self._servers[server.index] = server
        if known.incarnation == server.incarnation:
            return
        # Of another number of servers, which have the rows of those before unless they have restarted since.
        if server.generation > known.generation and server.has_rows:
            return
        if server.has_rows:
            get_default_logger().warning(
                "%s has replaced its predecessor, with the rows of its standby, or those that its storage "
                "tier had at the last checkpoint in place",
                server,
            )
            return
        error = _error(server)
        get_default_logger().error("%s", error)
        if self._rule is not OnLostRows.CONTINUE:
            self._lost[server.index] = server
            self._on_lost(error)


def _error(server: ServiceInfo) -> RowsLostError:
    return RowsLostError(
        f"{server} has restarted, and the rows that it held are lost: end the job and start it again from "
        "its last checkpoint. A storage tier (docs/tiers.md) keeps rows over a restart; with "
        'TrainCtx(on_lost_rows="continue") lost rows begin anew'
    )
