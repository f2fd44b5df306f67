"""docs/performance.md says how many measurements a step makes."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.observability_cost import Cluster
from persia.observability.phases import QUEUES, STEP_PHASES

DOCUMENT = Path(__file__).parents[3] / "docs" / "performance.md"


def test_the_measurements_of_a_step_are_as_many_as_documented() -> None:
    (counts,) = re.findall(r"counted: (\d+) measurements in C\+\+ and (\d+) in Python", DOCUMENT.read_text())
    cluster = Cluster(4)
    cluster.step(phases=True)  # with the calls that a server has only once
    before, steps = cluster.num_measured(), 20
    for _ in range(steps):
        cluster.step(phases=True)
    measured = (cluster.num_measured() - before) / steps
    cluster.close()
    # Rounded: a handler may be measured a little after its answer has come.
    assert (round(measured), len(STEP_PHASES) + len(QUEUES)) == tuple(map(int, counts))
