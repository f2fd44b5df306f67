"""Real clusters for tests and notebooks: the processes of a job on this machine, on free ports."""

from __future__ import annotations

from persia.launcher.local_cluster import LocalCluster, LocalNats

__all__ = ["LocalCluster", "LocalNats"]
