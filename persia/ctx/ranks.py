"""What the ranks of a job do together: join the process group, end together, let rank 0 work for all."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from persia import env
from persia.checkpoint.protocol import Report, State
from persia.distributed import DistributedBaseOption
from persia.errors import InternalError, PersiaError
from persia.job.runtime import JobRuntime
from persia.messaging.daemon_pool import DaemonPool
from persia.messaging.subjects import NN_WORKER

# Collectives end by the process group's time-out, minutes; loading terabytes may take longer. So rank 0 says
# now and then that it is still working.
_INTERVAL_S = 5.0
_WORKING, _DONE, _FAILED = 0, 1, 2
# Collectives want to know sizes before. A character is at most 12 bytes of JSON.
_MAX_ERROR_CHARS = 2000
_ERROR_BYTES = 12 * _MAX_ERROR_CHARS + 1000


def join_process_group(
    option: DistributedBaseOption,
    runtime: JobRuntime,
    place: tuple[int, int, int | None],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    resources: ExitStack,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Model and optimizer as `option` distributes them; rank 0's host is discovered unless it is given.

    `place`: rank, number of ranks and device. A process group that this initializes ends with `resources`.
    """
    rank, world_size, device_id = place
    # Ranks find the host of rank 0 by this address, and loaders find each rank.
    runtime.advertise(rank, world_size, address=f"{env.get_advertise_host()}:{option.master_port}")
    master_addr = option.master_addr
    if master_addr is None and not option.init_with_env_file() and runtime.connection is not None:
        directory = runtime.connection.directory
        ranks = directory.wait_for(NN_WORKER, env.get_deadline_s(), world_size)
        master_addr = ranks[0].address.rpartition(":")[0]
    # A group that the script has made is the script's to destroy.
    was_initialized = dist.is_initialized()
    made, new_optimizer = option.convert2distributed_model(
        model, world_size, rank, device_id, master_addr, optimizer
    )
    if not was_initialized:
        resources.callback(dist.destroy_process_group)
    return made, new_optimizer or optimizer


def extremes(value: int, world_size: int, device: torch.device | None) -> tuple[int, int]:
    """The smallest and the largest `value` of all ranks, which call it together."""
    if world_size == 1:
        return value, value
    both = torch.tensor([-value, value], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return -int(both[0]), int(both[1])


def meet(world_size: int) -> None:
    """Returns when all ranks have called it."""
    if world_size > 1:
        dist.barrier()


def done_by_rank_0(rank: int, work: Callable[[], None], device: torch.device | None) -> None:
    """Runs `work` on rank 0 once every rank has called this; returns on every rank when it has ended.

    All ranks raise what `work` raises: the others an error of the same class, if it is one of persia's.
    """
    # What the others have sent before they came here has arrived when `work` begins.
    dist.all_reduce(arrived := torch.ones(1, device=device))
    int(arrived)  # NCCL returns before the others have come; the number is there after them
    if rank != 0:
        while (status := _broadcast(_WORKING, device)) == _WORKING:
            pass
        if status == _FAILED:
            error = _told(None, device)
            raise type(error)(f"rank 0: {error}")
        return
    pool = DaemonPool(1, "persia-rank-0")
    future = pool.submit(work)
    while not wait([future], _INTERVAL_S).done:
        _broadcast(_WORKING, device)
    pool.close()
    failure = future.exception()
    _broadcast(_DONE if failure is None else _FAILED, device)
    if failure is not None:
        _told(failure, device)
        raise failure


def _told(failure: BaseException | None, device: torch.device | None) -> PersiaError:
    """Rank 0 tells the others what failed; their `failure` is None."""
    error = failure if isinstance(failure, PersiaError) else InternalError(repr(failure))
    # JSON, as torch's collectives of objects unpickle what they receive.
    text = Report(state=State.FAILED, error=type(error)(str(error)[:_MAX_ERROR_CHARS])).encode()
    content = torch.zeros(_ERROR_BYTES, dtype=torch.uint8, device=device)
    content[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=0)
    return Report.decode(bytes(content.cpu().tolist()).rstrip(b"\0")).error or error


def _broadcast(status: int, device: torch.device | None) -> int:
    tensor = torch.tensor([status], device=device)
    dist.broadcast(tensor, src=0)
    return int(tensor)


class Stateful(Protocol):
    """An optimizer, or a loss scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def join_uneven(
    model: DistributedDataParallel, holders: Sequence[Stateful], *, step_barrier: bool = False
) -> AbstractContextManager[object]:
    """Around the loop: a rank that runs out of data keeps joining collectives until every rank is done.

    Then the model and the `holders` are equal on all ranks, those of the last rank to end. torch's own join
    gives all ranks the parameters of that rank. Momenta, step counts and the loss scale would stay those of
    each rank's own last step: a checkpoint of an early rank would join the last model with an old optimizer,
    and training on would let the ranks drift apart. `step_barrier`: ranks that train meet at a barrier after
    each step.
    """
    return Join([model, _SharedStates(model, holders, step_barrier)])


class _SharedStates(Joinable):
    """Has no collective of its own while ranks train, but the barrier; meets them where the model does."""

    def __init__(
        self, model: DistributedDataParallel, holders: Sequence[Stateful], step_barrier: bool
    ) -> None:
        super().__init__()
        self.step_barrier = step_barrier
        self._model = model
        self.holders = holders

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _ShareAtTheEnd(self)

    @property
    def join_device(self) -> torch.device:
        device: torch.device = self._model.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        return self._model.join_process_group


class _ShareAtTheEnd(JoinHook):
    def __init__(self, shared: _SharedStates) -> None:
        self._shared = shared

    def main_hook(self) -> None:
        if self._shared.step_barrier:
            dist.barrier()

    def post_hook(self, is_last_joiner: bool) -> None:
        rank, device = dist.get_rank(), self._shared.join_device
        # The largest of the last ranks, as DDP takes the model from; and whether any has ended before them.
        vote = torch.tensor([rank if is_last_joiner else -1, int(not is_last_joiner)], device=device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX)
        source, uneven = vote.tolist()
        if not uneven:
            return
        states = _broadcast_states([holder.state_dict() for holder in self._shared.holders], source, device)
        if rank != source:
            for holder, state in zip(self._shared.holders, states, strict=True):
                holder.load_state_dict(state)


def _broadcast_states(
    states: list[dict[str, Any]], source: int, device: torch.device
) -> list[dict[str, Any]]:
    """The states of rank `source`. As bytes: a rank without batches does not know what they consist of."""
    box: list[bytes] = [b""]
    if dist.get_rank() == source:
        buffer = io.BytesIO()
        torch.save(states, buffer)
        box = [buffer.getvalue()]
    dist.broadcast_object_list(box, src=source, device=device)
    # To the CPU: tensors of the source name its device, which another rank must not use.
    result: list[dict[str, Any]] = torch.load(io.BytesIO(box[0]), map_location="cpu", weights_only=True)
    return result
