"""The phases of a step that happen in Python, measured for metrics and traces.

A phase is entered by one thread at a time; the time counts in the native histogram. On a GPU these are times
of the host: kernels that were only launched are not waited for.
"""

from __future__ import annotations

import threading
import time

from persia._native import DurationStats

NO_BATCH = 2**64 - 1


class Phase:
    """`with PHASE: ...`, or `with PHASE.of(batch_id): ...` where the batch is known. Not reentrant."""

    def __init__(self, name: str) -> None:
        self.stats = DurationStats(name)
        self._batch_id, self._reference = NO_BATCH, 0
        self._begin_ns = 0

    def of(self, batch_id: int, reference: int = 0) -> Phase:
        """`reference`: the embedding worker's number of the batch, by which servers know it."""
        self._batch_id, self._reference = batch_id, reference
        return self

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()

    def __exit__(self, *exc_info: object) -> None:
        self.stats.record(self._begin_ns, time.monotonic_ns(), self._reference, self._batch_id)
        self._batch_id, self._reference = NO_BATCH, 0


class Count:
    """A number that only grows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0

    def add(self) -> None:
        with self._lock:
            self._value += 1

    @property
    def value(self) -> int:
        return self._value


# One of each for the process: a rank has one training loop, and phases are entered by one thread at a time.
WAIT_FOR_BATCH = Phase("wait for batch")
LOOKUP_IN_STEP = Phase("lookup in step")  # of synchronous slots
TO_DEVICE = Phase("to device")
FORWARD = Phase("forward")
BACKWARD = Phase("backward")
HAND_IN = Phase("hand in gradients")
DENSE_STEP = Phase("dense step")
# In the order of a step.
STEP_PHASES = (WAIT_FOR_BATCH, LOOKUP_IN_STEP, TO_DEVICE, FORWARD, BACKWARD, HAND_IN, DENSE_STEP)

# Where a rank's batches wait for one another: many wait at a time, so these are no phases that are entered.
QUEUE_OF_SUBMITTED = DurationStats("queue of submitted batches")
QUEUE_OF_READY = DurationStats("queue of ready batches")
QUEUES = (QUEUE_OF_SUBMITTED, QUEUE_OF_READY)

SEND_BATCH = Phase("send batch")  # of a data loader

FORWARD_ERRORS = Count()  # lookups that failed
