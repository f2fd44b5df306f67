"""Where the batches of a `DataLoader` come from."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator

from persia.embedding.checks import at_least
from persia.embedding.data import PersiaBatch
from persia.errors import FailedPreconditionError, InvalidTypeError
from persia.job.batch_pipeline import BatchPipeline
from persia.logger import get_default_logger
from persia.pipeline.source import BatchSource, LocalSource


class IterableDatasetBase(abc.ABC):
    """`buffer_size`: batches kept before their lookup."""

    buffer_size = 10  # for subclasses that do not call __init__

    def __init__(self, buffer_size: int = 10) -> None:
        self.buffer_size = at_least(1, "buffer_size", buffer_size)

    @abc.abstractmethod
    def __iter__(self) -> Iterator[PersiaBatch]:
        """The batches, for a data set in this process."""

    @property
    def streamed(self) -> bool:
        """Whether the batches come from data loaders, once; else each iteration starts again."""
        return False

    @abc.abstractmethod
    def open_source(self, pipeline: BatchPipeline, *, ordered: bool) -> BatchSource:
        """Starts one iteration. `ordered`: batches must come in a reproducible order."""


class StreamingDataset(IterableDatasetBase):
    """What the job's data loaders send; `buffer_size` batches are kept for each of them.

    `loader` makes a script run without a cluster: with no PERSIA_NATS_URL it is called on a thread of this
    process, and the `DataCtx` in it feeds this data set; in a cluster it is not called.
    """

    def __init__(self, buffer_size: int = 10, loader: Callable[[], object] | None = None) -> None:
        super().__init__(buffer_size)
        if loader is not None and not callable(loader):
            raise InvalidTypeError(
                f"loader is a {type(loader).__name__}: pass a function that sends batches through a DataCtx"
            )
        # Not started here: the context that iterates the data set decides, which may be in a cluster.
        self.loader = loader

    def __iter__(self) -> Iterator[PersiaBatch]:
        raise NotImplementedError("a StreamingDataset is iterated through a DataLoader: DataLoader(dataset)")

    @property
    def streamed(self) -> bool:
        return True

    def open_source(self, pipeline: BatchPipeline, *, ordered: bool) -> BatchSource:
        job = pipeline.runtime.embedded
        if self.loader is None and job is not None and not job.has_nats:
            if not _may_have_loader():
                raise FailedPreconditionError(f"nothing can send batches to this job: {job.loader_remedy}")
            get_default_logger().info("batches are expected from a DataCtx on another thread of this process")
        return pipeline.receive(self.buffer_size, self.loader, ordered=ordered)


def _may_have_loader() -> bool:
    """Whether a thread is there that a DataCtx may run on, now or later: this one waits for its batches."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    return any(not name.startswith(_THREADS_OF_CONTEXTS) for name in others)


# In a process that trains; they send nothing. One that is missing here costs a log line instead of the error.
_THREADS_OF_CONTEXTS = (
    *("persia-feeder", "persia-lookup-", "persia-stage-", "persia-gradient-", "persia-reaper"),
    *(
        "persia-dataset",
        "persia-packets",
        "persia-http",
        "persia-health",
        "persia-metrics-push",
        "persia-otlp",
    ),
)


class IterableDataset(IterableDatasetBase):
    """A data set in this process: subclasses implement `__iter__`, which runs on a background thread."""

    def open_source(self, pipeline: BatchPipeline, *, ordered: bool) -> BatchSource:
        return LocalSource(self, self.buffer_size, pipeline.count_received)
