"""`python -m benchmarks.gpu.servers JSON`: an embedding worker and two parameter servers in one process.

`JSON` has the slots. Prints the worker's address, and ends with its standard input. Without a broker, so that
nothing but this repository is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any

from persia import _native
from persia.config import parse_embedding_config

__all__ = ["Servers"]

NUM_SERVERS, HOST = 2, "127.0.0.1"


class Servers:
    """The process, as a context manager that gives a client of it."""

    def __init__(self, slots: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.servers", json.dumps(slots)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> _native.RemoteClient:
        assert self._process.stdout is not None
        client = _native.RemoteClient(1)
        client.set_worker(0, self._process.stdout.readline().strip())
        return client

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # closes its standard input, at whose end it stops


def main() -> None:
    config = parse_embedding_config(json.loads(sys.argv[1]))
    servers = [
        _native.ParameterServer(
            replica_index=i, replica_size=NUM_SERVERS, capacity=10**8, num_internal_shards=8
        )
        for i in range(NUM_SERVERS)
    ]
    worker = _native.EmbeddingWorker(
        slots=config.native_slots(),
        feature_index_prefix_bit=config.feature_index_prefix_bit,
        num_servers=NUM_SERVERS,
    )
    for i, server in enumerate(servers):
        worker.set_server(i, f"{HOST}:{server.start(HOST, 0)}")
    print(f"{HOST}:{worker.start(HOST, 0)}", flush=True)
    sys.stdin.read()
    worker.stop()
    for server in servers:
        server.stop()


if __name__ == "__main__":
    main()
