"""From a lookup's arrays to the tensors a model gets, and from their gradients back to arrays.

A pooled slot becomes one float32 tensor [batch, dim]. A raw slot becomes [batch, sample_fixed_size, dim + 1]:
the rows of the sample's IDs, zeros where there are fewer, and a last channel that is 1 where a row is
present. What receives the gradient is the slot's *leaf*: the pooled tensor itself, or a raw slot's distinct
rows [num_rows, dim], so that autograd sums the gradient over the places a row is used in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from persia._native import LookupResult, SlotEmbedding

__all__ = ["EmbeddingTensors", "embedding_tensors", "leaf_gradients", "to_device"]


@dataclasses.dataclass
class EmbeddingTensors:
    """`tensors` go to the model, in the order of the batch's features; `leaves` are (slot name, leaf)."""

    tensors: list[torch.Tensor]
    leaves: list[tuple[str, torch.Tensor]]


def to_device(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Host to device through pinned memory, which torch's allocator keeps until the copy has arrived."""
    if device is None or device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def embedding_tensors(
    result: LookupResult,
    *,
    rest: Sequence[LookupResult] = (),
    device: torch.device | None = None,
    requires_grad: bool,
) -> EmbeddingTensors:
    """The tensors share memory with `result` on the CPU, and keep it alive.

    Those of `rest` have the slots that are absent from `result`.
    """
    made = EmbeddingTensors([], [])
    for slot in _complete(result, rest):
        leaf = to_device(torch.from_numpy(slot.rows), device).requires_grad_(requires_grad)
        made.leaves.append((slot.name, leaf))
        made.tensors.append(_expand_raw(slot, leaf, device) if slot.raw else leaf)
    return made


def _complete(result: LookupResult, rest: Sequence[LookupResult]) -> list[SlotEmbedding]:
    slots = result.slots
    for later in rest:  # each has all slots, in the order of the batch's features
        slots = [new if slot.absent else slot for slot, new in zip(slots, later.slots, strict=True)]
    return slots


def _expand_raw(slot: SlotEmbedding, leaf: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    assert slot.index is not None, "a raw slot has an index"
    index = to_device(torch.from_numpy(slot.index), device)
    rows = leaf.index_select(0, index.flatten()).view(*index.shape, leaf.shape[1])
    mask = (index != 0).to(leaf.dtype).unsqueeze(-1)
    return torch.cat([rows, mask], dim=-1)


def leaf_gradients(leaves: list[tuple[str, torch.Tensor]]) -> list[tuple[str, NDArray[np.float32] | None]]:
    """(slot name, float32 gradient [num_rows, dim]) per leaf; None for a slot that the loss did not reach.

    Copies to the host wait for the device, so the arrays are final.
    """
    return [(name, None if leaf.grad is None else _to_host(leaf.grad)) for name, leaf in leaves]


def _to_host(gradient: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = gradient.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return array
