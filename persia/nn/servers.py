"""A job's parameter servers as the home of a converted model's rows, for an ordinary training loop.

Contexts own the loop of a job, look ahead, and return gradients behind its back. An ordinary loop does none
of this: each lookup waits for its rows, and `backward()` until the servers have applied the gradients.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from persia import env
from persia._native import TrainConfig
from persia.checkpoint.checkpoints import DumpRequest, Source
from persia.config import SlotsConfig
from persia.errors import FailedPreconditionError, InvalidArgumentError
from persia.job.embedded import SlotsSource, read_slots
from persia.job.runtime import JobRuntime
from persia.logger import get_default_logger
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.counters import Counters, CounterValues
from persia.pipeline.lease import LeaseReaper

_CLOSE_S = 10.0  # for giving up lookups that never got a gradient


@contextlib.contextmanager
def job_servers(slots: SlotsSource | None = None) -> Iterator[Servers | None]:
    """The servers of the job that this process belongs to, for `convert(servers=...)`.

    None without PERSIA_NATS_URL, or with PERSIA_EMBEDDED=1: `convert` then keeps rows in this process, and
    the same script runs without a job.

    Args:
        slots: the job's slots, as a file, its contents, or a `persia.config.SlotsConfig`; None: those of
            PERSIA_EMBEDDING_CONFIG. `slots_for(model)` has what a model needs.

    Raises:
        FailedPreconditionError: no slots are named, or the workers have others.
        DeadlineExceededError, UnavailableError: broker or embedding workers do not answer.
    """
    if env.get_nats_url() is None or env.embedded():
        get_default_logger().info("no servers: a converted model's rows will be in this process")
        yield None
        return
    config = read_slots(slots)
    if config is None:
        raise FailedPreconditionError(
            "the job's slots are not known: pass slots= to job_servers, or set PERSIA_EMBEDDING_CONFIG"
        )
    servers = Servers(config)
    try:
        yield servers
    finally:
        servers.close()


class Servers:
    """Made by `job_servers`, and of use until its block ends."""

    def __init__(self, slots: SlotsConfig) -> None:
        self.slots = slots
        self.counters = Counters()
        self._configured = b""
        # Named apart from NN workers in the logs of the broker: it takes no batches of loaders.
        self._runtime = JobRuntime.connect(f"converted-model-{env.get_rank() or 0}", slots)
        self._is_closed = False
        self.reaper = LeaseReaper(self._runtime.backend, self.counters)

    @property
    def backend(self) -> EmbeddingBackend:
        if self._is_closed:
            raise FailedPreconditionError(
                "the connection to the servers is closed: use the converted model inside the block of "
                "job_servers()"
            )
        return self._runtime.backend

    @property
    def counts(self) -> CounterValues:
        """What became of the lookups made here so far."""
        return self.counters.snapshot()

    def check(self, dims: Mapping[str, int]) -> None:
        """That there is a slot for each weight, named as its module, of its dim, with rows of its own.

        Raises InvalidArgumentError naming the slot, and what to write in the embedding config.
        """
        numbers = self.slots.group_numbers()
        owners: dict[int, str] = {}
        for name, dim in dims.items():
            if reason := self._reason_against(name, dim):
                raise InvalidArgumentError(
                    f"the embedding config {reason}: write slots_config.{name} with dim: {dim} and nothing "
                    "else (persia.nn.slots_for has all of a model's), or leave the module out by select="
                )
            other = owners.setdefault(numbers[name], name)
            if other != name:
                raise InvalidArgumentError(
                    f"the embedding config has the slots {other!r} and {name!r} in one feature group, where "
                    "their rows would be the same, but their weights are two: take them out of it"
                )

    def _reason_against(self, name: str, dim: int) -> str:
        slot = self.slots.slots_config.get(name)
        if slot is None:
            return f"has no slot {name!r}"
        if slot.dim != dim:
            return f"has the slot {name!r} with dim={slot.dim}"
        if not slot.embedding_summation or slot.sqrt_scaling or slot.mean_scaling:
            return f"has the slot {name!r} pooled by something else than a plain sum"
        if slot.hash_stack is not None:
            return f"has the slot {name!r} with a hash stack, where IDs have no row of their own"
        if (slot.admit_after or 1) > 1:
            return (
                f"has the slot {name!r} with admit_after={slot.admit_after}, which would count the lookups "
                "that updates repeat, too"
            )
        return ""

    def check_train_config(self, config: TrainConfig) -> None:
        """That rows which are here already would not get another one: a job has one for all rows."""
        if self._configured not in (b"", config.encode()):
            raise InvalidArgumentError(
                "the servers have rows of an earlier convert() with another optimizer or embedding_config, "
                "and a job has one for all of its rows: pass the same here; slots can have their own in the "
                "embedding config (slots_config.<slot>.optimizer)"
            )

    def configure(self, config: TrainConfig) -> None:
        """Gives all servers their training config, unless they have it from here already."""
        encoded = config.encode()
        # Each converted weight calls this with the same config, and a call reaches all servers.
        if encoded != self._configured:
            self.backend.configure(config, replace=True)
            self._configured = encoded

    def dump(
        self, url: str | os.PathLike[str], *, step: int | None = None, keep_last: int | None = None
    ) -> None:
        """Writes all rows of all servers to a directory or URL that they reach (docs/checkpoints.md).

        One rank calls it. Raises what a dump of a context does.
        """
        self._runtime.checkpoints.dump(DumpRequest(url, step=step, keep_last=keep_last))

    def load(self, url: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Replaces all rows of all servers by those of a checkpoint. One rank calls it, after `convert`.

        Other ranks must not look up before it is done: let them wait, as by `torch.distributed.barrier()`.
        """
        self._runtime.checkpoints.load(Source(url), strict=strict)

    def close(self) -> None:
        """Gives up lookups that got no gradient, and disconnects; idempotent."""
        # First: an update that another thread begins now must not find a reaper that has ended.
        self._is_closed = True
        self.reaper.close(min(_CLOSE_S, env.get_deadline_s()))
        self._runtime.close(_CLOSE_S)
