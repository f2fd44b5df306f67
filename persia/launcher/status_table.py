"""The table that `persia-launcher status` draws, and the looks at a job that it is drawn from."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from persia.messaging.session import NatsSession
from persia.messaging.subjects import (
    DATA_LOADER,
    EMBEDDING_PARAMETER_SERVER,
    EMBEDDING_WORKER,
    NN_WORKER,
    SERVING,
)
from persia.observability.status import (
    ProcessStatus,
    ask_processes,
    find_processes,
    job_status,
    missing_replicas,
    rates,
    with_gone,
)

# The first three cells after the state have one meaning for all roles, so that rows can be compared.
_COLUMNS = ("process", "state", "rate", "in flight", "waiting", "memory", "details")
# Below this many columns a table would cut the names of processes and wrap every cell.
_TABLE_WIDTH = 120


class JobView:
    """The processes of a job as seen now, and as seen before: by discovery, or at known addresses."""

    def __init__(self, session: NatsSession | None, addresses: Sequence[str], job_name: str) -> None:
        """Looks once. `session` None: the processes are those at `addresses`."""
        self._session = session
        self._addresses = addresses
        self._job_name = job_name
        # As wide as the table: what is piped elsewhere must not be cut.
        self._console = Console(width=None if sys.stdout.isatty() else 200)
        self._before: dict[tuple[str, int], ProcessStatus] = {}
        self.now: list[ProcessStatus] = []
        self._look()

    @property
    def exit_code(self) -> int:
        """0: every process of the job is there, and ready."""
        ready = all(status.values is not None and status.values["ready"] for status in self.now)
        complete = self._session is None or not missing_replicas(status.info for status in self.now)
        return 0 if self.now and ready and complete else 1

    def as_json(self) -> str:
        return json.dumps([asdict(status) for status in self.now], indent=2)

    def print_once(self, interval_s: float) -> None:
        """Prints the table, with the rates of one interval."""
        time.sleep(interval_s)
        self._look()
        self._console.print(self._render())

    def watch(self, interval_s: float) -> None:
        """Draws the table again and again, until Ctrl-C."""
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(self._render(), console=self._console, screen=False, auto_refresh=False) as live,
        ):
            while True:
                time.sleep(interval_s)
                self._look()
                live.update(self._render(), refresh=True)

    def _look(self) -> None:
        # Rates need two looks. Processes are matched by role and index, which a restart keeps.
        self._before = {(status.info.role, status.info.index): status for status in self.now}
        if self._session is None:
            self.now = ask_processes(self._addresses)
            return
        # Without the broker there is no discovery, but the processes known before may well train on.
        if self._session.is_connected:
            here = [place for place, status in self._before.items() if not status.gone]
            known = find_processes(self._session, here)
        else:
            known = [status.info for status in self.now]
        self.now = with_gone(self._before, job_status(known))

    def _render(self) -> RenderableType:
        width = self._console.width  # asked each time: the window may have another size by now
        if self._session is None:
            return render(self._before, self.now, "by address", width=width, is_whole_job=False)
        lost = "" if self._session.is_connected else ": its NATS server does not answer, reconnecting"
        return render(self._before, self.now, f"job {self._job_name}{lost}", width=width)


def render(
    before: Mapping[tuple[str, int], ProcessStatus],
    now: Sequence[ProcessStatus],
    title: str,
    *,
    width: int = _TABLE_WIDTH,
    is_whole_job: bool = True,
) -> RenderableType:
    """`before`: the look before this one, by role and index; rates are differences to it.

    `width`: columns of the terminal; a narrow one gets two lines for each process instead of a table.
    `is_whole_job`: replicas that `now` lacks are missed.
    """
    rows = [_row(status, rates(before.get((status.info.role, status.info.index)), status)) for status in now]
    shown: list[RenderableType] = [Text(title, style="italic"), *map(_narrow, rows)]
    if width >= _TABLE_WIDTH:
        table = Table(title=title, title_justify="left", expand=False)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in ("process", "state", "details") else "right")
        for row in rows:
            table.add_row(*row)
        shown = [table]
    below = [Text(line) for line in (_reported(now),) if line]
    missing = missing_replicas(status.info for status in now) if is_whole_job else []
    if missing:
        below.append(Text(f"not there: {', '.join(missing)}; start them, or see their logs", style="red"))
    return Group(*shown, *below)


def _narrow(row: Sequence[str | Text]) -> Text:
    """A row of the table as lines: name and state, then what the other columns say."""
    name, state, rate, in_flight, waiting, memory, details = row
    counts = (f"{in_flight} in flight" if in_flight else "", f"{waiting} waiting" if waiting else "")
    below = ", ".join(str(text) for text in (rate, *counts, memory, details) if text)
    return Text.assemble(name, "  ", state, f"\n  {below}")


def si(value: float) -> str:
    """1234567 as "1.23M"."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def _row(status: ProcessStatus, rate: Mapping[str, float]) -> list[str | Text]:
    name = f"{status.info.role} {status.info.index}"
    if status.values is None:
        state = Text("gone", style="red") if status.gone else Text("no status", style="yellow")
        return [name, state, "", "", "", "", status.error or ""]
    values, stats = status.values, status.values["stats"]
    state = Text("not ready", style="red")
    if values["ready"]:
        configured = values["configured"]
        state = Text("ready", style="green") if configured else Text("not configured", style="yellow")
    cells = _CELLS[status.info.role](stats, rate)
    memory = f"{values['resident_bytes'] / 2**20:,.0f} MiB"
    # What keeps a process from working is the only detail of interest then.
    details = cells[3] if values["ready"] else str(values["reason"])
    restarts = values.get("restarts", 0)  # older processes do not tell
    restarted = f"{restarts} restart{'s' * (restarts > 1)}; " if restarts else ""
    return [name, state, *cells[:3], memory, restarted + details]


def _per_second(rate: Mapping[str, float], key: str, what: str) -> str:
    return f"{si(rate[key])} {what}/s" if key in rate else ""


def _server_cells(stats: Mapping[str, Any], rate: Mapping[str, float]) -> tuple[str, str, str, str]:
    looked_up, missing = stats["num_looked_up_rows"], stats["num_missing_rows"]
    hits = f"{1 - missing / looked_up:.1%} hits, " if looked_up else ""
    staleness = f"staleness {stats['sum_staleness'] / max(stats['num_updates'], 1):.1f}"
    details = f"{si(stats['num_rows'])} rows, {si(stats['num_evicted_rows'])} evicted, {hits}{staleness}"
    details += _tier(stats) + _following(stats)
    running, waiting = str(stats["rpc_num_running"]), str(stats["rpc_num_in_line"])
    return _per_second(rate, "num_looked_up_rows", "rows"), running, waiting, details


def _worker_cells(stats: Mapping[str, Any], rate: Mapping[str, float]) -> tuple[str, str, str, str]:
    retries = sum(server["num_retries"] for server in stats["servers"])
    # The share of IDs that is left after duplicates: it tells how much the worker saves the servers.
    unique = stats["num_signs"] / stats["num_ids"] if stats["num_ids"] else 0.0
    details = f"{unique:.0%} unique, {stats['num_expired']} expired, {retries} RPC retries"
    in_flight, waiting = str(stats["num_in_flight"]), str(stats["num_buffered"])
    return _per_second(rate, "num_looked_up", "batches"), in_flight, waiting, details


def _nn_cells(stats: Mapping[str, Any], rate: Mapping[str, float]) -> tuple[str, str, str, str]:
    trained, failed = stats["batches_trained"], stats["batches_failed"]
    details = f"{si(trained)} trained, {stats['batches_released']} released, {failed} failed"
    waiting = str(sum(stats["queues"].values()))
    return _per_second(rate, "batches_trained", "batches"), str(stats["in_flight"]), waiting, details


def _loader_cells(stats: Mapping[str, Any], rate: Mapping[str, float]) -> tuple[str, str, str, str]:
    return _per_second(rate, "num_sent", "batches"), "", "", f"{si(stats['num_sent'])} sent"


def _serving_cells(stats: Mapping[str, Any], rate: Mapping[str, float]) -> tuple[str, str, str, str]:
    samples = stats["num_samples"] / max(stats["num_batches"], 1)
    models = stats.get("models")  # None: there is one
    details = f"{len(models)} models" if models else f"version {stats['served_version']}"
    details += f", {stats['num_failed']} failed, {si(samples)} samples a batch"
    if rate.get("num_requests"):
        details += f", {rate['request_s'] / rate['num_requests'] * 1e3:.1f} ms"
    for model in models or ():
        details += f"; {model['model']}: version {model['served_version']}{_version(model)}"
    details += "" if models else _version(stats)
    running, waiting = str(stats["num_running"]), str(stats["num_waiting"])
    return _per_second(rate, "num_requests", "requests"), running, waiting, details


def _version(stats: Mapping[str, Any]) -> str:
    """Describes what follows the version of a served model."""
    details = _following(stats)
    if stats["version_error"] and stats["following"] is None:
        details += f"; the newest version cannot be served: {stats['version_error']}"
    if (canary := stats.get("canary")) is not None:  # None also: of an older version
        details += f"; canary {canary['version'] or 'not loaded'}, {canary['num_errors']} errors"
        if canary["rolled_back"] or canary["error"]:
            details += f", {canary['error'] or 'rolled back: ' + canary['rolled_back']}"
    return details


def _tier(stats: Mapping[str, Any]) -> str:
    """Describes the storage tier of a parameter server."""
    tier = stats.get("tier")
    if tier is None:
        return ""
    step = "no checkpoint"
    if tier["checkpoint"] is not None:
        step = "checkpoint of no step" if tier["step"] is None else f"checkpoint of step {tier['step']}"
    pending = f", {tier['num_pending']} pending" if tier["num_pending"] else ""
    return f", {si(tier['num_hot'])} cached, {si(tier['num_promoted'])} promoted, {step}{pending}"


def _following(stats: Mapping[str, Any]) -> str:
    """Describes how far a process has followed the packets of a training."""
    following = stats.get("following")
    if following is None:
        return ""
    behind, delay_s = following["num_behind"], following["delay_s"]
    parts = [f", packet {following['number']}", "" if behind is None else f", {behind} behind"]
    # One that is held at a packet is not late: it is where somebody wants it.
    if following["pinned"]:
        parts.append(", pinned")
    elif delay_s is not None:
        parts.append(f", {delay_s:.1f} s late")
    kind = "held" if following.get("held") else "stuck"
    parts.append(f", {kind}: {following['error']}" if following["error"] else "")
    return "".join(parts)


_CELLS = {
    EMBEDDING_PARAMETER_SERVER: _server_cells,
    EMBEDDING_WORKER: _worker_cells,
    NN_WORKER: _nn_cells,
    DATA_LOADER: _loader_cells,
    SERVING: _serving_cells,
}


def _reported(now: Sequence[ProcessStatus]) -> str:
    """What scripts report, "auc 0.79  step 1.2k"; of several ranks the first that has the name."""
    values: dict[str, float] = {}
    for status in now:
        for name, value in ((status.values or {}).get("reported") or {}).items():
            # Ranks report the same numbers, so one of them is enough.
            values.setdefault(name, value)
    return "  ".join(f"{name} {value:.6g}" for name, value in values.items())
