"""What is pushed to a gateway, which here only counts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, Metric

from persia.observability.exposition import Families
from persia.observability.push import Pusher

DEADLINE_S = 60.0


@pytest.fixture
def gateway() -> Iterator[tuple[str, queue.Queue[str]]]:
    """Its address, and the requests that it gets."""
    requests: queue.Queue[str] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._take()

        def do_DELETE(self) -> None:
            self._take()

        def _take(self) -> None:
            length = int(self.headers["Content-Length"])
            requests.put(self.rfile.read(length).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}", requests
        server.shutdown()
        thread.join()


class FailsFirst:
    """A collector of a process that is not complete when it is asked first."""

    def __init__(self) -> None:
        self.num_asked = 0

    def collect(self) -> list[Metric]:
        self.num_asked += 1
        if self.num_asked == 1:
            raise AttributeError("not there yet")
        families = Families(role="r", replica="0")
        families.gauge("persia_rows", "Rows.", 3)
        return list(families.collect())


def test_metrics_that_cannot_be_read_are_pushed_the_next_time(
    gateway: tuple[str, queue.Queue[str]],
) -> None:
    address, requests = gateway
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FailsFirst())
    pusher = Pusher(address, registry, job="job", grouping={"role": "r"}, interval_s=0.01)
    assert "persia_rows" in requests.get(timeout=DEADLINE_S)
    pusher.close()
