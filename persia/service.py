"""Where the embedding workers of a job are, for inference clients that run outside of it."""

from __future__ import annotations

from persia import env

__all__ = ["get_embedding_worker_services"]


def get_embedding_worker_services() -> list[str]:
    """Addresses of the embedding workers: EMBEDDING_WORKER_SERVICE, else the published default."""
    # One address that stands for all workers, such as a service of Kubernetes.
    return [env.get_embedding_worker_service()]
