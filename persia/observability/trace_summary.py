"""Where the time of a batch goes, from the events of a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def summarize(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each phase of each role: milliseconds of a batch, and how often it occurs in one.

    Only spans that belong to a training batch count. Phases overlap, so that they add up to more than a batch
    takes.
    """
    roles = {e["pid"]: e["args"]["name"].rpartition(" ")[0] for e in events if e["name"] == "process_name"}
    microseconds: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    batches: set[int] = set()
    for pid, name, batch_id, duration_us in _spans(events):
        batches.add(batch_id)
        microseconds[roles[pid], name] += duration_us
        counts[roles[pid], name] += 1
    if not batches:
        return ["no span of a training batch was recorded"]
    lines = [f"{'process':26} {'phase':32} {'ms a batch':>10} {'times':>6}   of {len(batches)} batches"]
    # By role in the order of the trace, which is the way of a batch; the longest phase of a role first.
    order = {role: place for place, role in enumerate(dict.fromkeys(roles.values()))}
    for role, name in sorted(microseconds, key=lambda key: (order[key[0]], -microseconds[key])):
        mean_ms, times = microseconds[role, name] / 1000 / len(batches), counts[role, name] / len(batches)
        lines.append(f"{role:26} {name:32} {mean_ms:10.3f} {times:6.1f}")
    return lines


def _spans(events: Iterable[Mapping[str, Any]]) -> Iterable[tuple[int, str, int, float]]:
    """Process, name, batch and microseconds of each span that belongs to a batch."""
    begun: dict[str, float] = {}
    for event in events:
        batch_id = event["args"].get("batch_id")
        if batch_id is None:
            continue
        if event["ph"] == "X":
            yield event["pid"], event["name"], batch_id, event["dur"]
        elif event["ph"] == "b":
            begun[event["id"]] = event["ts"]
        elif event["ph"] == "e" and event["id"] in begun:
            yield event["pid"], event["name"], batch_id, event["ts"] - begun.pop(event["id"])
