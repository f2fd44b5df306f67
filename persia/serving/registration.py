"""Shows a server of predictions to its job, for `persia-launcher status` and Prometheus' targets.

Serving does not depend on it: while the job's broker is away the server is not shown, and keeps answering.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from persia import env
from persia.errors import FailedPreconditionError, PersiaError
from persia.logger import get_default_logger
from persia.messaging.discovery import Advertiser, ServiceInfo
from persia.messaging.session import NatsSession

_CONNECT_S = 5.0
_LEAVE_S = 2.0


@contextlib.contextmanager
def registered(nats_url: str | None, info: ServiceInfo) -> Iterator[None]:
    """Makes `info` known for the time of the block, as soon as the broker is there. Waits for nothing.

    `nats_url` None: the server is not advertised.
    """
    if nats_url is None:
        yield
        return
    stopped = threading.Event()
    thread = threading.Thread(
        target=_register, args=(nats_url, info, stopped), name="persia-register", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_LEAVE_S)


def _register(nats_url: str, info: ServiceInfo, stopped: threading.Event) -> None:
    has_warned = False
    while not stopped.is_set():
        try:
            with NatsSession(nats_url, env.get_job_name(), name=f"{info.role} {info.index}") as session:
                session.connect(_CONNECT_S)
                advertiser = Advertiser(session, info)
                advertiser.start()
                get_default_logger().info("%s is shown in the job %s", info, env.get_job_name())
                stopped.wait()
                advertiser.stop()
        except FailedPreconditionError as failure:
            get_default_logger().error("this server is not shown in persia-launcher status: %s", failure)
            return
        except PersiaError as failure:
            if not has_warned:
                get_default_logger().warning(
                    "this server is not shown in persia-launcher status for now: %s", failure
                )
                has_warned = True
            stopped.wait(1.0)
