"""A NATS server on a free port of this machine, under a supervisor."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from persia.errors import DeadlineExceededError, UnavailableError
from persia.launcher.job import JobSpecs
from persia.launcher.nats import nats_config
from persia.launcher.supervisor import ManagedProcess, Supervisor

__all__ = ["start_local_nats"]

_MAX_PAYLOAD_BYTES = 64 << 20
_START_DEADLINE_S = 20.0
_POLL_INTERVAL_S = 0.02


def start_local_nats(supervisor: Supervisor, folder: Path) -> str:
    """Starts a server and returns its URL; `folder` (empty, to be deleted after the job) takes its
    configuration.

    Started again under its name, it takes the same port. Raises `UnavailableError` when it ends at once.
    """
    config_file = folder / "nats-server.conf"
    _write_config(config_file, port=0)
    process = supervisor.start(JobSpecs.nats_server(config_file, dict(os.environ)))
    url = _await_url(process, folder)
    # Its clients reconnect to the URL that they know: a restarted server must not choose a new port.
    _write_config(config_file, port=int(url.rpartition(":")[2]))
    return url


def _write_config(config_file: Path, port: int) -> None:
    config_file.write_text(
        nats_config(
            host="127.0.0.1", port=port, max_payload_bytes=_MAX_PAYLOAD_BYTES, ports_folder=config_file.parent
        )
    )


def _await_url(process: ManagedProcess, folder: Path) -> str:
    ports_file = folder / f"nats-server_{process.pid}.ports"
    deadline = time.monotonic() + _START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.wait(_POLL_INTERVAL_S) is not None:
            raise UnavailableError(
                f"the NATS server ended with exit code {process.exit_code}:\n{process.output}"
            )
        # The server does not write the file in one piece.
        if ports_file.exists() and (text := ports_file.read_text()).endswith("}"):
            return str(json.loads(text)["nats"][0])
    raise DeadlineExceededError(f"the NATS server did not say its port within {_START_DEADLINE_S:g} s")
