"""A job as seen from outside: its processes, and what each answers at `/status`."""

from __future__ import annotations

import functools
import json
import ssl
import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError

from persia.errors import PermissionDeniedError, UnavailableError
from persia.messaging.discovery import Directory, ServiceInfo
from persia.messaging.interface import Session
from persia.messaging.subjects import ROLES
from persia.security import http_token
from persia.security.tls import TlsFiles, job_tls

# The second one where a process is missing: on a busy machine some answer late.
_FIND_WINDOWS_S = (0.4, 1.6)
_FETCH_TIMEOUT_S = 3.0
_COMMAND_TIMEOUT_S = 60.0  # the end of a recording brings all its spans
_MAX_ANSWER_BYTES = 256 << 20


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any, **_settings: Any) -> None:
        return None  # an HTTPError


def _open(request: urllib.request.Request, tls: TlsFiles | None, timeout_s: float) -> Any:
    # The token is for the address that was asked: not for a proxy of the environment, nor for another.
    handlers: list[Any] = [urllib.request.ProxyHandler({}), _NoRedirect]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls.client_context()))
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """`values` is None where the process shows no status, or did not answer: `error` tells which.

    `gone`: it answered earlier, and does not now.
    """

    info: ServiceInfo
    values: Mapping[str, Any] | None
    error: str | None = None
    gone: bool = False


def find_processes(session: Session, known: Collection[tuple[str, int]] = ()) -> list[ServiceInfo]:
    """All processes of the job that answer now, in the order of the roles.

    `known`: role and index of those that answered before. It waits longer where one of them, or a replica, is
    missing.
    """
    directory = Directory(session)
    found: dict[tuple[str, int, int], ServiceInfo] = {}
    processes: list[ServiceInfo] = []
    # Each question waits out its window, because the number of replicas is not known: all roles at once.
    with ThreadPoolExecutor(len(ROLES)) as pool:
        for window_s in _FIND_WINDOWS_S:
            for infos in pool.map(functools.partial(directory.present, window_s=window_s), ROLES):
                found |= {(info.role, info.index, info.incarnation): info for info in infos}
            processes = sorted(found.values(), key=lambda info: (ROLES.index(info.role), info.index))
            here = {(info.role, info.index) for info in processes}
            if here.issuperset(known) and not missing_replicas(processes):
                break
    return processes


def job_status(processes: Iterable[ServiceInfo]) -> list[ProcessStatus]:
    """Asks all of them at once."""
    infos = list(processes)
    answers = _ask_all([info.status_address for info in infos])
    return [
        ProcessStatus(info=info, values=values, error=error)
        for info, (values, error) in zip(infos, answers, strict=True)
    ]


def ask_processes(addresses: Sequence[str]) -> list[ProcessStatus]:
    """The same of processes that no broker knows, such as those of an inference job, by status address."""
    statuses = []
    # Without an answer its role is not known: the address stands in for it.
    for position, (address, (values, error)) in enumerate(zip(addresses, _ask_all(addresses), strict=True)):
        known = values or {}
        info = ServiceInfo(
            role=known.get("role", address),
            index=known.get("index", position),
            replicas=known.get("replicas", len(addresses)),
            incarnation=known.get("pid", 0),
            address=address,
            pid=known.get("pid", 0),
            status_address=address,
        )
        statuses.append(ProcessStatus(info=info, values=values, error=error))
    return statuses


def _ask_all(addresses: Sequence[str]) -> list[tuple[dict[str, Any] | None, str | None]]:
    """Status and error of each, one of them None."""

    def ask(address: str) -> tuple[dict[str, Any] | None, str | None]:
        if not address:
            return None, "shows no status (PERSIA_METRICS_PORT=off)"
        try:
            return fetch_json(address, "/status") or None, None
        except (UnavailableError, PermissionDeniedError) as error:
            return None, str(error)

    # A process that hangs costs its thread the whole time-out: few threads would add these up.
    with ThreadPoolExecutor(max(1, min(len(addresses), 32))) as pool:
        return list(pool.map(ask, addresses))


def with_gone(
    before: Mapping[tuple[str, int], ProcessStatus], now: Sequence[ProcessStatus]
) -> list[ProcessStatus]:
    """`now`, and the processes of `before` that it lacks: a killed process publishes no LEFT event.

    Those that another number of servers has replaced are not missed.
    """
    here = {(status.info.role, status.info.index) for status in now}
    reason = "it does not answer any more: it has ended, was killed, or is cut off; see its log"
    gone = [
        ProcessStatus(info=status.info, values=None, error=reason, gone=True)
        for place, status in before.items()
        if place not in here and not any(other.info.has_replaced(status.info) for other in now)
    ]
    order = {role: number for number, role in enumerate(ROLES)}
    return sorted([*now, *gone], key=lambda status: (order[status.info.role], status.info.index))


def missing_replicas(processes: Iterable[ServiceInfo]) -> list[str]:
    """Of the roles that are there, the replicas that are not, as "embedding-worker 1"."""
    infos = list(processes)
    here = {(info.role, info.index) for info in infos}
    sizes = {info.role: info.replicas for info in infos}
    return [
        f"{role} {index}"
        for role, size in sizes.items()
        for index in range(size)
        if (role, index) not in here
    ]


def fetch_json(address: str, path: str, *, method: str = "GET") -> dict[str, Any]:
    """Raises UnavailableError, naming the address, when there is no answer that can be read.

    PermissionDeniedError: the process does not belong to the job of this one's secret and certificate.
    """
    tls = job_tls()
    url = f"{'http' if tls is None else 'https'}://{address}{path}"
    headers = {"Authorization": f"Bearer {http_token()}"}
    request = urllib.request.Request(url, headers=headers, method=method)
    timeout_s = _FETCH_TIMEOUT_S if method == "GET" else _COMMAND_TIMEOUT_S
    try:
        with _open(request, tls, timeout_s) as answer:
            # Bounded: the address may belong to another program.
            values = json.loads(answer.read(_MAX_ANSWER_BYTES))
    except HTTPError as error:
        if error.code != 401:
            raise UnavailableError(f"no answer from {url}: {error}") from error
        raise PermissionDeniedError(
            f"{url} refuses the secret of this process, or wants TLS: set PERSIA_JOB_SECRET or "
            "PERSIA_JOB_SECRET_FILE to that of the job (`persia-launcher secret show` on one of its hosts), "
            "and PERSIA_TLS_DIR if the job has it"
        ) from None
    except (OSError, ValueError) as error:
        # An ssl.SSLError has a `reason` as well, a string. It arrives unwrapped if the server refuses this
        # process's certificate: TLS 1.3 reports that with the first read.
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, ssl.SSLError):
            raise PermissionDeniedError(
                f"{url} and this process do not agree on TLS ({cause}): set PERSIA_TLS_DIR for both, to "
                "folders with certificates of one CA (`persia-launcher certificates create`)"
            ) from error
        raise UnavailableError(f"no answer from {url}: {error}") from error
    if not isinstance(values, dict):
        raise UnavailableError(f"{url} does not answer like a process of persia")
    return values


def rates(before: ProcessStatus | None, now: ProcessStatus) -> dict[str, float]:
    """What each counter of `stats` has grown by a second, between two looks at the same process."""
    if before is None or before.values is None or now.values is None:
        return {}
    # Counters of a restarted process begin at 0, and the difference would be negative.
    if before.info.incarnation != now.info.incarnation:
        return {}
    elapsed = now.values["monotonic_s"] - before.values["monotonic_s"]
    old, new = before.values["stats"], now.values["stats"]
    if elapsed <= 0:
        return {}
    return {
        key: (new[key] - old[key]) / elapsed
        for key in new
        if isinstance(new[key], (int, float)) and isinstance(old.get(key), (int, float))
    }
