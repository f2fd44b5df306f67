"""Recorded spans as OpenTelemetry's. Imports OpenTelemetry, which is optional.

A batch is a trace, and no process asks another for IDs: they are hashes of what all know, the job, the batch
and the name of a phase. Phases nest by time within a process; the request handlers of servers hang under the
phase of the caller that waits for them.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from persia.messaging.subjects import NN_WORKER
from persia.observability.trace import Span

_SCOPE = InstrumentationScope("persia")
# Numbers of batches repeat: each data set begins at 0, and so does each job of a name.
_EPOCH_NS = 600 * 10**9
_MAX_OPEN = 1000
_ROOT, _FIRST, _LAST = "batch", "client lookup", "client return gradients"
# The phase of the calling process that a handler works for. One process only has it of a batch.
_CALLERS = {
    "handle LookupReference": _FIRST,
    "handle LookupDirect": _FIRST,
    "handle ReturnGradients": _LAST,
    "handle LookupRows": "lookup rpc",
    "handle UpdateRows": "update rpc",
}
_SHARED = frozenset(_CALLERS.values())


class SpansTranslator:
    """For one process; spans of a batch may come in several turns. A rank also makes the span of the batch in
    all, from lookup to gradient return."""

    def __init__(self, resource: Resource, job: str, role: str, index: int) -> None:
        self._resource, self._job, self._role, self._index = resource, job, role, index
        # Spans are on the monotonic clock, and OpenTelemetry wants wall time. Taken once: steps of the wall
        # clock must not reorder spans.
        self._to_unix_ns = time.time_ns() - time.monotonic_ns()
        self._begins: dict[int, int] = {}  # of batches whose gradients have not returned, by number

    def translate(self, spans: Sequence[Span]) -> list[ReadableSpan]:
        by_batch: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            if span.batch_id is not None:
                by_batch[span.batch_id & 0xFFFFFFFF].append(span)  # as servers know it
        return [done for batch, own in by_batch.items() for done in self._of_batch(batch, own)]

    def _of_batch(self, batch: int, spans: list[Span]) -> list[ReadableSpan]:
        spans = sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns))
        found: list[ReadableSpan] = []
        open_spans: list[tuple[Span, str]] = []  # that contain the one at hand, with their names for IDs
        for number, span in enumerate(spans):
            # Sorted by begin, so the open spans form a stack: those that end before this one are no parents
            # of it.
            while open_spans and open_spans[-1][0].end_ns < span.end_ns:
                open_spans.pop()
            # Equal for all processes, or only this one's.
            unique = f"{self._role} {self._index} {span.begin_ns} {number}"
            key = span.name if span.name in _SHARED else f"{span.name} of {unique}"
            parent = open_spans[-1][1] if open_spans else _CALLERS.get(span.name, _ROOT)
            open_spans.append((span, key))
            found.append(self._span(span.name, batch, span.begin_ns, span.end_ns, key, parent, span.thread))
        return found + (self._root(batch, spans) if self._role == NN_WORKER else [])

    def _root(self, batch: int, spans: list[Span]) -> list[ReadableSpan]:
        for span in spans:
            if span.name == _FIRST:
                self._begins[batch] = span.begin_ns
        if len(self._begins) > _MAX_OPEN:  # batches that were given up return no gradients
            self._begins.pop(next(iter(self._begins)))
        last = [span for span in spans if span.name == _LAST]
        if not last:
            return []
        begin_ns = self._begins.pop(batch, spans[0].begin_ns)
        return [self._span(_ROOT, batch, begin_ns, last[-1].end_ns, _ROOT, None, last[-1].thread)]

    def _span(
        self, name: str, batch: int, begin_ns: int, end_ns: int, key: str, parent: str | None, thread: int
    ) -> ReadableSpan:
        trace_key = f"{self._job} {batch} {(begin_ns + self._to_unix_ns) // _EPOCH_NS}"
        kind = SpanKind.CLIENT if name.startswith("rpc to ") else SpanKind.INTERNAL
        return ReadableSpan(
            name=name,
            context=_context(trace_key, key),
            parent=None if parent is None else _context(trace_key, parent),
            resource=self._resource,
            attributes={"batch_id": batch, "thread.id": thread},
            kind=SpanKind.SERVER if name.startswith("handle ") else kind,
            start_time=begin_ns + self._to_unix_ns,
            end_time=end_ns + self._to_unix_ns,
            instrumentation_scope=_SCOPE,
        )


def _context(trace_key: str, key: str) -> SpanContext:
    trace_id = int.from_bytes(hashlib.blake2b(trace_key.encode(), digest_size=16).digest(), "big")
    span_id = int.from_bytes(hashlib.blake2b(f"{trace_key} {key}".encode(), digest_size=8).digest(), "big")
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
