"""One set of gradients for the ranks of a process group: the mean of all ranks', as DDP has it.

Where every rank has all rows each applies it to its own, and rows stay equal. Where servers have the rows
each rank applies it to some of the weights, and all wait until every one has. What is sent is small, the IDs
of a batch and the gradients of its bags, once at the end of each backward pass and for all converted modules
together: a module which a rank did not use costs no agreement of its own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import distributed as dist

from persia.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from persia.nn.store_embedding import BagGradients, PendingUpdates, StoreModule, Uses


class RankExchange:
    """Called by every rank at the end of each of its backward passes; their numbers must be equal.

    `in_servers`: ranks share one set of rows.
    """

    def __init__(self, group: dist.ProcessGroup, *, in_servers: bool) -> None:
        # Weak: a script that destroys the group must not wait for a model that still refers to it.
        # Its threads would outlive the interpreter, which aborts the process.
        self._group_reference = weakref.ref(group)
        self._in_servers = in_servers
        # Of this thread: those of autograd, where gradients are exchanged, have a device of their own.
        self._device = _device_of(group)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_reference()
        if group is None:
            raise FailedPreconditionError(
                "the process group of this converted model has ended: train before destroy_process_group()"
            )
        return group

    def load_weights(self, weights: Sequence[tuple[StoreModule, torch.Tensor]]) -> None:
        """Rank 0's weights into the modules of all ranks.

        Rows in servers are written by rank 0 alone. Every rank returns when they are written, or raises: what
        is loaded next is not written over.
        """
        if not self._in_servers:
            for module, weight in weights:
                module.load_weight(from_rank_0(weight, self._group, self._device))
            return
        with self.together():
            # Ranks would write the same rows, each as many bytes as the table has.
            if dist.get_rank(self._group) == 0:
                for module, weight in weights:
                    module.load_weight(weight)
        for module, _ in weights:
            for buffer in module.buffers():
                buffer.copy_(from_rank_0(buffer, self._group, self._device))

    def __call__(self, updates: PendingUpdates, uses: Uses) -> Uses:
        numbers = range(len(updates.rows))
        own = [_joined(uses.get(number, []), updates.rows[number].embedding_dim) for number in numbers]
        evicted = [0 if self._in_servers else rows.stats().num_evicted for rows in updates.rows]
        sizes = _gather(
            torch.tensor([[len(use.ids), len(use.lengths), evicted[i]] for i, use in enumerate(own)]),
            self._group,
            self._device,
        )
        # Before the gradients are exchanged: all ranks raise here, or none, and none waits for another.
        _check_none_evicted(updates, sizes[:, :, 2])
        own_integers = [array for use in own for array in (use.ids.view(np.int64), use.lengths)]
        integers = gather_ragged(torch.from_numpy(np.concatenate(own_integers)), self._group, self._device)
        floats = gather_ragged(
            torch.cat([use.gradient.reshape(-1) for use in own]), self._group, self._device
        )
        everyone: Uses = {number: [] for number in numbers}
        for rank, counts in enumerate(sizes.tolist()):
            place_i = place_f = 0
            for number, (num_ids, num_bags, _) in enumerate(counts):
                dim = updates.rows[number].embedding_dim
                ids = integers[rank][place_i : place_i + num_ids]
                lengths = integers[rank][place_i + num_ids : place_i + num_ids + num_bags]
                gradient = floats[rank][place_f : place_f + num_bags * dim].view(num_bags, dim)
                place_i += num_ids + num_bags
                place_f += num_bags * dim
                everyone[number].append(
                    # The mean over the ranks, as DDP has it.
                    BagGradients(ids.numpy().view(np.uint64), lengths.numpy(), gradient / len(sizes), None)
                )
        if not self._in_servers:
            return everyone
        rank = dist.get_rank(self._group)
        # Servers apply each update that they get, so each weight is updated by one rank.
        return {number: everyone[number] for number in numbers if number % len(sizes) == rank}

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Ends on every rank when all have applied their share; raises on every rank where one could not."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self._in_servers:
                raise
            failure = error
        if not self._in_servers:
            return
        # The rank that failed comes here, too: the others wait for it in the collective.
        failures = _gather(torch.tensor([failure is not None]), self._group, self._device)
        failed = failures.flatten().nonzero().flatten()
        if failure is not None:
            raise failure
        if len(failed):
            raise UnavailableError(
                f"rank {int(failed[0])} could not update rows in the servers; its own error says why"
            )


def from_rank_0(
    tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device | None = None
) -> torch.Tensor:
    """Rank 0's tensor, on every rank of the group."""
    # Copied: the collective overwrites what the other ranks pass, which may be a weight in use.
    shared = tensor.detach().to(device or _device_of(group), copy=True)
    dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
    return shared.to(tensor.device)


def gather_ragged(
    tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device | None = None
) -> list[torch.Tensor]:
    """Tensors [n] of all ranks, on the host; n may differ."""
    device = device or _device_of(group)
    sizes = _gather(torch.tensor([len(tensor)]), group, device).flatten().tolist()
    # Backends differ in whether they gather tensors of unequal sizes: each rank pads to the longest.
    gathered = _gather(torch.nn.functional.pad(tensor, (0, max(sizes) - len(tensor))), group, device)
    return [padded[:size] for padded, size in zip(gathered, sizes, strict=True)]


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Tensors [*] of one shape on all ranks as one [ranks, *], on the host."""
    mine = tensor.to(device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return torch.stack(gathered).cpu()


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the group's backend wants tensors."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _joined(uses: Sequence[BagGradients], dim: int) -> BagGradients:
    if not uses:
        return BagGradients(np.empty(0, np.uint64), np.empty(0, np.int64), torch.empty(0, dim), None)
    return BagGradients(
        np.concatenate([use.ids for use in uses]),
        np.concatenate([use.lengths for use in uses]),
        torch.cat([use.gradient for use in uses]),
        None,
    )


def _check_none_evicted(updates: PendingUpdates, num_evicted: torch.Tensor) -> None:
    """Ranks evict by their own lookups: one may have lost a row that another still trains.

    Every rank knows all counts [ranks, rows], so either all of them raise or none.
    """
    for rows, counts in zip(updates.rows, num_evicted.T, strict=True):
        if counts.any():
            raise ResourceExhaustedError(
                f"{rows.name!r} has more rows than its capacity, and ranks would evict different ones: raise "
                "capacity, or use parameter servers, which share one set of rows"
            )
