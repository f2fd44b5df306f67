"""The training loop's side of the data: iterates a data set as batches with their embeddings looked up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from persia.current import current_context
from persia.data.dataset import IterableDatasetBase
from persia.embedding.checks import at_least
from persia.errors import FailedPreconditionError, InvalidTypeError
from persia.job.batch_pipeline import BatchPipeline
from persia.observability.phases import WAIT_FOR_BATCH
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.prefetch import Prefetcher


class DataLoader:
    """Iterate it inside a context: `for batch in loader: output, labels = ctx.forward(batch)`.

    Args:
        dataset: a `StreamingDataset`, iterated once, or an `IterableDataset`, any number of times.
        forward_buffer_size: most batches looked up ahead of the loop. Hybrid mode looks up fewer where the
            loop need not wait for them.
        timeout_ms: longest wait for one batch; then DeadlineExceededError. The end of the data is
            announced, so a time-out is always a failure.
        num_workers: lookups at a time.
        reproducible: batches in the order of their batch_id, one lookup at a time; and one batch at a time
            between its lookup and its update, unless `embedding_staleness` says otherwise. With one rank,
            two runs are then equal bit for bit.
        embedding_staleness: training batches that may be between their lookup and the acknowledgement of
            their update; None: no bound besides the buffers. Slots may have bounds of their own.
    """

    def __init__(
        self,
        dataset: IterableDatasetBase,
        forward_buffer_size: int = 10,
        timeout_ms: int = 1000 * 60 * 10,
        num_workers: int = 10,
        reproducible: bool = False,
        embedding_staleness: int | None = None,
    ) -> None:
        if not isinstance(dataset, IterableDatasetBase):
            raise InvalidTypeError(
                f"dataset is a {type(dataset).__name__}: pass a StreamingDataset, or subclass IterableDataset"
            )
        self.forward_buffer_size = at_least(1, "forward_buffer_size", forward_buffer_size)
        self.timeout_ms = at_least(1, "timeout_ms", timeout_ms)
        at_least(1, "num_workers", num_workers)
        if embedding_staleness is not None:
            at_least(1, "embedding_staleness", embedding_staleness)
        if reproducible and embedding_staleness is None:
            embedding_staleness = 1
        self.dataset = dataset
        # Lookups that race would insert and evict rows in another order in each run.
        self.num_workers = 1 if reproducible else num_workers
        self.reproducible = reproducible
        self.embedding_staleness = embedding_staleness
        self.waited_s = 0.0  # seconds that loops over it have waited for a batch
        self._stream: tuple[BatchPipeline, Prefetcher] | None = None
        self._stream_ended = False

    def __iter__(self) -> Iterator[PersiaTrainingBatch]:
        pipeline = current_context(BatchPipeline)
        if pipeline is None:
            raise FailedPreconditionError(
                "a DataLoader is iterated inside a context that looks embeddings up: "
                "`with TrainCtx(...) as ctx:` or `with eval_ctx(...) as ctx:`"
            )
        return self._iterate_stream(pipeline) if self.dataset.streamed else self._iterate_once(pipeline)

    def _iterate_once(self, pipeline: BatchPipeline) -> Iterator[PersiaTrainingBatch]:
        prefetcher = self._open(pipeline)
        try:
            yield from self._batches(prefetcher)
        finally:
            # Also when the script leaves the loop: the generator is closed, and batches ahead are given up.
            pipeline.end_prefetch(prefetcher)

    def _iterate_stream(self, pipeline: BatchPipeline) -> Iterator[PersiaTrainingBatch]:
        """Continues where an iteration left with `break` has stopped; the context ends the stream."""
        if self._stream is None or self._stream[0] is not pipeline:
            self._stream, self._stream_ended = (pipeline, self._open(pipeline)), False
        if self._stream_ended:
            raise FailedPreconditionError(
                "the stream of the data loaders has ended, it can be iterated once: "
                "let the loaders send every epoch, or use an IterableDataset"
            )
        # Entered with the first batch and left after the last one: a rank that runs out of data joins the
        # collectives of the others where it leaves.
        with pipeline.around_stream():
            yield from self._batches(self._stream[1])
            self._stream_ended = True

    def _open(self, pipeline: BatchPipeline) -> Prefetcher:
        return pipeline.prefetch(
            # Called once, by BatchPipeline.prefetch.
            partial(self.dataset.open_source, pipeline, ordered=self.reproducible),
            forward_buffer_size=self.forward_buffer_size,
            num_workers=self.num_workers,
            embedding_staleness=self.embedding_staleness,
            reproducible=self.reproducible,
        )

    def _batches(self, prefetcher: Prefetcher) -> Iterator[PersiaTrainingBatch]:
        while True:
            begin = time.monotonic()
            with WAIT_FOR_BATCH:
                batch = prefetcher.next(self.timeout_ms / 1000)
            self.waited_s += time.monotonic() - begin
            if batch is None:
                return
            yield batch
            # Held here no longer: a batch that the script drops without backward must be seen to be dropped.
            del batch
