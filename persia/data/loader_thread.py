"""A data loader as a thread of the training process, for jobs without a broker."""

from __future__ import annotations

import threading
from collections.abc import Callable

from persia.data.embedded import EmbeddedJob, running_for
from persia.data.stream import StreamReceiver
from persia.errors import FailedPreconditionError, PersiaError, StreamClosedError, UnavailableError
from persia.logger import get_default_logger

__all__ = ["LoaderThread"]

_END_S = 5.0


class LoaderThread:
    """Runs `loader()`, whose DataCtx feeds `job`; what goes wrong there is raised in the training loop."""

    def __init__(self, loader: Callable[[], object], job: EmbeddedJob, receiver: StreamReceiver) -> None:
        self._loader = running_for(job, loader)
        self._receiver = receiver
        self._thread = threading.Thread(target=self._run, name="persia-loader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After the receiver has stopped: waits for the loader to notice."""
        self._thread.join(_END_S)
        if self._thread.is_alive():  # it cannot be interrupted; a daemon, it does not keep the process
            get_default_logger().warning("the data loader did not end within %g s, left behind", _END_S)

    def _run(self) -> None:
        try:
            self._loader()
        except StreamClosedError:
            pass  # training has ended first
        except BaseException as error:  # also sys.exit(): the loop must not wait for more
            self._receiver.fail(_in_loop(error))
        else:
            if not self._receiver.has_heard:
                self._receiver.fail(FailedPreconditionError("the data loader has ended without a DataCtx"))


def _in_loop(error: BaseException) -> PersiaError:
    failure = UnavailableError(f"the data loader ended with an error: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
