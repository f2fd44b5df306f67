"""The NATS subjects of one job; its name in them keeps jobs that share a broker apart.

Listed in docs/wire_format.md, "NATS messages".
"""

from __future__ import annotations

import re

from persia.errors import InvalidArgumentError

EMBEDDING_PARAMETER_SERVER = "embedding-parameter-server"
EMBEDDING_WORKER = "embedding-worker"
NN_WORKER = "nn-worker"
DATA_LOADER = "data-loader"
SERVING = "serving"  # persia-launcher serve
ROLES = (EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER, NN_WORKER, DATA_LOADER, SERVING)

# A dot, a wildcard or a blank in the job's name would make its subjects match those of another job.
_JOB_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Subjects:
    """Builds the subjects of the job `job_name`."""

    def __init__(self, job_name: str) -> None:
        if not _JOB_NAME.fullmatch(job_name):
            raise InvalidArgumentError(
                f"job name {job_name!r} is not usable in NATS subjects: "
                "use letters, digits, '_' and '-' (PERSIA_JOB_NAME)"
            )
        self._prefix = f"persia.{job_name}"

    def advertise(self, role: str) -> str:
        """A replica of `role` has started, or has stopped cleanly.

        One subject for both: messages of two subjects may be handled in any order, and `joined` after its
        `left` would make a service that has left look alive.
        """
        return self._of_role("advertise", role)

    def who(self, role: str) -> str:
        """Asks every replica of `role` for its service info."""
        return self._of_role("who", role)

    def ids(self, worker_index: int) -> str:
        """ID features for an embedding worker."""
        return f"{self._prefix}.ids.{_checked_index(worker_index)}"

    def batch(self, rank: int) -> str:
        """Batches that loaders submit to an NN worker."""
        return f"{self._prefix}.batch.{_checked_index(rank)}"

    def end(self, rank: int) -> str:
        """End-of-stream messages for an NN worker."""
        return f"{self._prefix}.end.{_checked_index(rank)}"

    def position(self, rank: int) -> str:
        """A loader asks which of its batches an NN worker need not get."""
        return f"{self._prefix}.position.{_checked_index(rank)}"

    def taken(self, rank: int) -> str:
        """Rank 0 asks which batches an NN worker has trained at the step of a checkpoint."""
        return f"{self._prefix}.taken.{_checked_index(rank)}"

    def checkpoint(self, server_index: int) -> str:
        """Dumps and loads of a parameter server."""
        return f"{self._prefix}.checkpoint.{_checked_index(server_index)}"

    def replica(self, server_index: int, incarnation: str) -> str:
        """One of the processes of a parameter server with standbys, or "all" of them."""
        # Incarnations are hex digits, so none is "all".
        return f"{self._prefix}.replica.{_checked_index(server_index)}.{incarnation}"

    def resize(self, generation: int, server_index: int) -> str:
        """A parameter server, of the number of servers before or after a change."""
        return f"{self._prefix}.resize.{_checked_index(generation)}.{_checked_index(server_index)}"

    @property
    def resize_job(self) -> str:
        """Changes of the number of parameter servers, by the process that supervises the job."""
        return f"{self._prefix}.resize"

    @property
    def training_dump(self) -> str:
        """Dumps of dense part and rows, by rank 0."""
        return f"{self._prefix}.checkpoint.training"

    def _of_role(self, verb: str, role: str) -> str:
        if role not in ROLES:
            raise InvalidArgumentError(f"unknown role {role!r}: one of {', '.join(ROLES)}")
        return f"{self._prefix}.{verb}.{role}"


def _checked_index(index: int) -> int:
    if index < 0:
        raise InvalidArgumentError(f"replica index {index} is negative")
    return index
