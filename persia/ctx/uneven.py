"""DDP's join for ranks with unequal numbers of batches, extended to what steps the model.

When ranks have ended at different steps, torch gives all of them the parameters of one that went on to the
end. Momenta, step counts and the loss scale would stay those of each rank's own last step: a checkpoint that
an early rank writes would join the last model with an old optimizer, and training on would let the ranks
drift apart.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Stateful", "join_uneven"]


class Stateful(Protocol):
    """An optimizer, or a loss scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def join_uneven(
    model: DistributedDataParallel, holders: Sequence[Stateful], *, step_barrier: bool = False
) -> AbstractContextManager[object]:
    """Around the loop: a rank that has ended serves the others' collectives until all have ended.

    Then the model and the `holders` are equal on all ranks, those of the last rank to end. `step_barrier`:
    ranks that train meet at a barrier after each step.
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
        states = _broadcast([holder.state_dict() for holder in self._shared.holders], source, device)
        if rank != source:
            for holder, state in zip(self._shared.holders, states, strict=True):
                holder.load_state_dict(state)


def _broadcast(states: list[dict[str, Any]], source: int, device: torch.device) -> list[dict[str, Any]]:
    """The states of rank `source`. As bytes: a rank without batches does not know what they consist of."""
    buffer = io.BytesIO()
    if dist.get_rank() == source:
        torch.save(states, buffer)
    size = torch.tensor([buffer.tell()], device=device)
    dist.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        data.copy_(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
    dist.broadcast(data, source)
    received = io.BytesIO(data.cpu().numpy().tobytes())
    result: list[dict[str, Any]] = torch.load(received, map_location="cpu", weights_only=True)
    return result
