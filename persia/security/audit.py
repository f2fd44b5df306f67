"""The audit log: one JSON object a line for what changes a job by hand, and for what was refused.

Lines go to the file PERSIA_AUDIT_LOG, which is opened for each so that it can be rotated, or to the log.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from datetime import datetime, timezone

from persia import _native, env
from persia.logger import get_default_logger

REFUSED = "refused"  # an outcome, or how it begins
_UNPROVEN = "none"  # the native module's role of a peer that has proved none
_POLL_S = 1.0
# Strangers cause lines about refused requests: no more than these are written a second, and the rest counted.
_REFUSED_PER_S = 5

_lock = threading.Lock()
_second = 0
_num_refused = 0  # in that second
_num_left_out = 0  # since a line has said how many
_is_started = False


def record(
    *, peer: str, role: str | None, method: str, outcome: str = "ok", at: float | None = None, **more: object
) -> None:
    """Writes a line with `more` keys. `at`: Unix time, by default now. Thread-safe; never raises."""
    at = time.time() if at is None else at
    left_out = _take_turn(int(at)) if outcome.startswith(REFUSED) else 0
    if left_out is None:
        return
    line: dict[str, object] = {
        "time": datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds"),
        "peer": peer,
        "role": role,
        "method": method,
        "outcome": outcome,
        "pid": os.getpid(),
        **more,
    }
    if left_out:
        line["refused_without_line"] = left_out
    _write(json.dumps(line))


def start() -> None:
    """Writes what RPC servers of this process record, until the process ends. Idempotent."""
    global _is_started
    with _lock:
        if _is_started:
            return
        _is_started = True
    threading.Thread(target=_poll, name="persia-audit", daemon=True).start()
    atexit.register(_write_events)


def _poll() -> None:
    while True:
        time.sleep(_POLL_S)
        _write_events()


def _write_events() -> None:
    for event in _native.take_audit_events():
        record(
            peer=event["peer"],
            role=None if event["role"] == _UNPROVEN else event["role"],
            method=event["method"],
            outcome=event["outcome"],
            at=event["time"],
        )


def _take_turn(second: int) -> int | None:
    """Lines left out before this one, or None for one to leave out as well."""
    global _second, _num_refused, _num_left_out
    with _lock:
        if second != _second:
            _second, _num_refused = second, 0
        if _num_refused >= _REFUSED_PER_S:
            _num_left_out += 1
            return None
        _num_refused += 1
        left_out, _num_left_out = _num_left_out, 0
        return left_out


def _write(line: str) -> None:
    path = env.get_audit_log()
    try:
        if path:
            # One write of one line, at the end of the file: processes may share it.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, f"{line}\n".encode())
            finally:
                os.close(descriptor)
            return
    except OSError as error:
        get_default_logger().error("the audit log %s cannot be written: %s", path, error.strerror)
    get_default_logger().info("audit: %s", line)
