"""Draws one batch of a trace: `python monitoring/draw_trace.py trace.json trace.svg`.

For documents; to look at a trace, load it into https://ui.perfetto.dev. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Span = dict[str, Any]  # name, process, begin_ms, end_ms, batch
_LANE_INCHES = 0.2
_THINNEST = 0.002  # of the width
_ROLES = ("data-loader", "nn-worker", "embedding-worker", "embedding-parameter-server")
_COLORS = dict(zip(_ROLES, ("#7f7f7f", "#1f77b4", "#2ca02c", "#d62728"), strict=True))


def read_spans(path: Path) -> list[Span]:
    """Phases and calls of a trace, times in milliseconds."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    calls = {(event["pid"], event["id"]): event["ts"] for event in events if event["ph"] == "e"}
    spans = []
    for event in events:
        if event["ph"] not in ("X", "b"):
            continue
        end = event["ts"] + event["dur"] if event["ph"] == "X" else calls[event["pid"], event["id"]]
        spans.append(
            {
                "name": event["name"],
                "process": processes[event["pid"]],
                "begin_ms": event["ts"] / 1000,
                "end_ms": end / 1000,
                "batch": event["args"].get("batch_id"),
            }
        )
    return spans


def quickest_batch(spans: list[Span]) -> int:
    """Of the batches seen in the most phases, the one with the shortest time from its announcement to its
    update: where other programs have disturbed the least."""
    by_batch: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span["batch"] is not None:
            by_batch[span["batch"]].append(span)
    if not by_batch:
        raise SystemExit("no span of this trace carries a batch_id: was the job training?")
    # Batches at either end of a recording lack phases, and would look quicker than they were.
    most = max(len(own) for own in by_batch.values())
    length = {b: _length_ms(own) for b, own in by_batch.items() if len(own) == most}
    return min(length, key=lambda batch: length[batch])


def _length_ms(spans: list[Span]) -> float:
    own = [span for span in spans if span["process"].startswith("nn-worker")]
    if not own:
        return float("inf")
    return max(span["end_ms"] for span in own) - min(span["begin_ms"] for span in own)


def draw(spans: list[Span], batch: int, output: Path) -> None:
    """One lane a phase of a process, in the order of roles and times; `batch` in colour, others in grey."""
    from matplotlib import pyplot as plt

    # What a loader does comes long before: the batch waits in buffers between.
    own = [span for span in spans if span["batch"] == batch and not span["process"].startswith("data-loader")]
    begin, end = min(span["begin_ms"] for span in own), max(span["end_ms"] for span in own)
    first = {}
    for span in sorted(own, key=lambda span: span["begin_ms"]):
        first.setdefault((span["process"], span["name"]), span["begin_ms"])
    lanes = sorted(first, key=lambda lane: (_ROLES.index(lane[0].rpartition(" ")[0]), lane[0], first[lane]))
    figure, axes = plt.subplots(figsize=(11, 1.2 + _LANE_INCHES * len(lanes)))
    # The batch last: where other batches wait in the same queue, they would cover it.
    for span in sorted(spans, key=lambda span: span["batch"] == batch):
        lane = (span["process"], span["name"])
        if lane not in first or span["end_ms"] < begin or span["begin_ms"] > end:
            continue
        left, right = max(span["begin_ms"], begin), min(span["end_ms"], end)
        color = _COLORS[lane[0].rpartition(" ")[0]] if span["batch"] == batch else "#dddddd"
        width = max(right - left, _THINNEST * (end - begin))  # else it would not be seen
        axes.barh(lanes.index(lane), width, left=left - begin, height=0.7, color=color)
    axes.set_yticks(range(len(lanes)), [f"{process}: {name}" for process, name in lanes], fontsize=8)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, end - begin)
    axes.set_xlabel(f"milliseconds since batch {batch} was announced to its rank; grey: other batches")
    axes.grid(axis="x", linewidth=0.3)
    figure.tight_layout()
    figure.savefig(output, dpi=80, bbox_inches="tight")  # with all of the longest lane's name
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--batch", type=int, help="batch_id; else the quickest")
    arguments = parser.parse_args()
    spans = read_spans(arguments.trace)
    batch = quickest_batch(spans) if arguments.batch is None else arguments.batch
    draw(spans, batch, arguments.output)
    print(f"batch {batch}: {arguments.output}")


if __name__ == "__main__":
    main()
