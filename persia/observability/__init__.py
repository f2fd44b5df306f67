"""Watching a job run: metrics, health, status and traces of every process, over one HTTP port of each.

Scripts need one name of it: `report(auc=0.79, step=1200)` shows the job's own numbers beside ours.
docs/operations.md has the rest.
"""

from __future__ import annotations

from persia.observability.reported import report

__all__ = ["report"]
