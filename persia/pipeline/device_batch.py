"""Stages 3 to 5 with a device: one copy takes a batch to it, and one brings the gradients back.

In: the `LookupResult`s of a batch, with distinct rows instead of pooled embeddings where a slot has them;
later the gradients of the leaves. Out: tensors on the device; later arrays, with one gradient for each
distinct row. A lookup thread packs and sends, the loop pools, and a gradient thread sums and fetches
(docs/adr/0049-a-batch-crosses-to-the-device-once.md).

Everything is written in operations of torch that sum in the order of the native kernels, so the results are
equal, on the CPU as well: there the tests compare. Only a -0.0 may become 0.0. Training on the CPU does not
come here: it uses the native results in place (`persia.pipeline.batch`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from persia._native import LookupResult, PackedBlock
from persia.embedding.dense_codec import DenseSection
from persia.pipeline.backend import SlotGradient

_ALIGNMENT = 64  # of arrays in a pack, as in native/src/worker/device_pack.cc

Leaves = Sequence[tuple[str, torch.Tensor | None]]  # None: not looked up


class Sent:
    """Memory of a device, whose contents are on their way."""

    def __init__(self, memory: torch.Tensor, arrived: torch.cuda.Event | None = None) -> None:
        self.memory, self.arrived = memory, arrived
        self.received_on: torch.cuda.Stream | None = None  # the last stream that waits for the event


class Lane:
    """The way between the host and a device, here one whose memory is the host's: that of tests."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """What `send` takes."""
        # The device is named: a script may have set another default.
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def send(self, host: torch.Tensor) -> Sent:
        """The same bytes on the device, some time. Does not wait."""
        return Sent(host)

    def receive(self, sent: Sent) -> None:
        """What this thread starts on the device from here on may read what was sent."""

    def mark(self) -> torch.cuda.Event | None:
        """The end of what this thread has started on the device."""
        return None

    @contextlib.contextmanager
    def behind(self, mark: torch.cuda.Event | None, read: Sequence[torch.Tensor]) -> Iterator[None]:
        """What is started inside runs beside the loop's work and after `mark`; it may read `read`."""
        yield

    def fetch(self, values: torch.Tensor) -> NDArray[np.float32]:
        """The values on the host: waits for them. Inside `behind`."""
        array: NDArray[np.float32] = values.numpy()
        return array


class CudaLane(Lane):
    """Copies through pinned memory on a stream for each direction, beside what the loop computes.

    The allocators of torch keep the memory: pinned memory until the copies from and to it are done, and
    memory of the device until the streams are past the point where the last reference ended, if each stream
    that reads it is recorded. Streams and the current device belong to a thread, so each method sets both.
    Else the end of `torch.cuda.stream` would make device 0 current, and a context there for each rank.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        # Without a device set, a thread's pinned memory would belong to device 0, and make a context there.
        with torch.cuda.device(self.device):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def send(self, host: torch.Tensor) -> Sent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.stream(self._in):
            sent = host.to(self.device, non_blocking=True)
            event.record(self._in)
        return Sent(sent, event)

    def receive(self, sent: Sent) -> None:
        current = torch.cuda.current_stream(self.device)
        if sent.received_on == current:
            return
        assert sent.arrived is not None, "made by send"
        current.wait_event(sent.arrived)
        sent.memory.record_stream(current)
        sent.received_on = current

    def mark(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextlib.contextmanager
    def behind(self, mark: torch.cuda.Event | None, read: Sequence[torch.Tensor]) -> Iterator[None]:
        assert mark is not None, "made by mark"
        with torch.cuda.device(self.device), torch.cuda.stream(self._out):
            self._out.wait_event(mark)
            for tensor in read:
                tensor.record_stream(self._out)
            yield

    def fetch(self, values: torch.Tensor) -> NDArray[np.float32]:
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        # Blocking: the thread sleeps. Otherwise it would use a core to look at the device.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._out)
        event.synchronize()  # without the GIL
        array: NDArray[np.float32] = host.numpy()
        return array


@functools.cache
def _cuda_lane(device: torch.device) -> CudaLane:
    return CudaLane(device)


def lane_of(device: torch.device | None) -> Lane | None:
    """None: batches stay on the host, whose tensors are the native results."""
    return None if device is None or device.type != "cuda" else _cuda_lane(device)


class _Block:
    """Slots of one dim, pooled together."""

    def __init__(self, packed: PackedBlock, batch_size: int, pack: torch.Tensor) -> None:
        self.slots, self.first_rows, self.dim = packed.slots, packed.first_rows, packed.dim
        self.batch_size, num_bags = batch_size, batch_size * len(packed.slots)
        self._rows = _view(pack, packed.rows, (self.first_rows[-1], packed.dim), torch.float32)
        self._numbers = _view(pack, packed.numbers, (packed.num_numbers,), torch.int32)
        self._offsets = self._factors = None
        if packed.offsets is not None:
            self._offsets = _view(pack, packed.offsets, (num_bags + 1,), torch.int32)
        if packed.factors is not None:
            self._factors = _view(pack, packed.factors, (num_bags, 1), torch.float32)

    def pool(self) -> Sequence[torch.Tensor]:
        """The embeddings [batch, dim] of each slot."""
        offsets = self._offsets
        if offsets is None:
            # Bags of one row: a gather of torch takes several times as long for short rows.
            offsets = torch.arange(len(self._numbers) + 1, dtype=torch.int32, device=self._rows.device)
        bags = _sum_bags(self._rows, self._numbers, offsets)
        if self._factors is not None:
            bags.mul_(self._factors)
        # unsafe: as if each had its own memory. A model may work on one slot in place, and a check of `split`
        # for that would call what autograd has saved of the others changed.
        return bags.unsafe_split(self.batch_size)

    def join(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """A copy of the block's part of the batch's gradients, [bags, dim]. None counts as zeros."""
        zeros = self._rows.new_zeros(()).expand(self.batch_size, self.dim)
        mine = [gradients[position] for position in self.slots]
        return torch.cat([zeros if gradient is None else gradient for gradient in mine])

    def sum_by_row(self, bags: torch.Tensor, inverse_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """([rows, dim], each slot's greatest magnitude before it was scaled)."""
        greatest = torch.linalg.vector_norm(bags.view(len(self.slots), -1), float("inf"), dim=1)
        # The scale times the bag's factor, then times the gradient: rounded as the kernels round.
        if self._factors is not None:
            bags = bags * (self._factors * inverse_scale)
        elif inverse_scale != 1.0:
            bags = bags * inverse_scale
        # By a stable sort, so that a row's gradients are added up in the order of the samples.
        numbers, users = self._numbers.sort(stable=True)
        rows = torch.arange(self.first_rows[-1] + 1, dtype=torch.int32, device=bags.device)
        begins = torch.searchsorted(numbers, rows, out_int32=True)
        if self._offsets is not None:
            places = torch.arange(len(numbers), dtype=torch.int32, device=bags.device)
            users = torch.searchsorted(self._offsets[1:], places, right=True)[users]
        # In 32 bits, which are fewer bytes to read for each row.
        return _sum_bags(bags, users.to(torch.int32), begins), greatest


class _Other(NamedTuple):
    """A slot that is in no block."""

    position: int
    rows: torch.Tensor
    row_numbers: torch.Tensor | None  # raw: of each ID


class _Pack:
    """One lookup on its way to the device. All views of it are made by the lookup thread, not by the loop."""

    def __init__(self, lane: Lane, result: LookupResult, arrays: Sequence[NDArray[np.generic]]) -> None:
        layout, slots = result.lay_out_pack(), result.slots
        self.names = [slot.name for slot in slots]
        end, places = layout.size_bytes, []
        for array in arrays:
            end = (end + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
            places.append(end)
            end += array.nbytes
        host = lane.host_memory(max(end, 1))
        buffer = host.numpy()
        result.fill_pack(layout, buffer)
        for array, place in zip(arrays, places, strict=True):
            buffer[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.sent = lane.send(host)
        memory, size = self.sent.memory, layout.batch_size
        self.arrays = [
            _view(memory, place, array.shape, torch.from_numpy(np.empty(0, array.dtype)).dtype)
            for array, place in zip(arrays, places, strict=True)
        ]
        self.blocks = [_Block(packed, size, memory) for packed in layout.blocks]
        self.others = []
        for packed in layout.slots:
            slot = slots[packed.position]
            rows = _view(memory, packed.rows, (slot.num_rows, slot.dim), torch.float32)
            index = None
            if packed.index is not None:
                index = _view(memory, packed.index, (size, slot.sample_fixed_size), torch.int32)
            self.others.append(_Other(packed.position, rows, index))


class DeviceBatch:
    """One batch on its device. A lookup thread makes it, and the loop uses it."""

    def __init__(self, lane: Lane, result: LookupResult, dense: DenseSection) -> None:
        self._lane = lane
        self._num_features = len(dense.features)
        arrays = [array for _, array in (*dense.features, *dense.labels)]
        self._packs = [_Pack(lane, result, arrays)]

    def add(self, result: LookupResult) -> None:
        """Slots that are absent from the lookups before."""
        self._packs.append(_Pack(self._lane, result, ()))

    def features(self) -> list[torch.Tensor]:
        """The dense features."""
        return self._dense(slice(None, self._num_features))

    def labels(self) -> list[torch.Tensor]:
        return self._dense(slice(self._num_features, None))

    def _dense(self, which: slice) -> list[torch.Tensor]:
        pack = self._packs[0]
        self._lane.receive(pack.sent)
        # Copied: a script may keep or save labels, and views would keep the rows of the batch with them.
        return [array.clone() for array in pack.arrays[which]]

    @torch.no_grad()
    def embeddings(
        self, *, requires_grad: bool
    ) -> list[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
        """(slot, leaf, index of a raw slot), in the order of the batch's features; None: not looked up."""
        found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for pack in self._packs:
            self._lane.receive(pack.sent)
            for block in pack.blocks:
                pooled = block.pool()
                found |= {i: (bags, None) for i, bags in zip(block.slots, pooled, strict=True)}
            found |= {other.position: (other.rows, other.row_numbers) for other in pack.others}
        for leaf, _ in found.values():
            leaf.requires_grad_(requires_grad)
        return [(name, *found.get(i, (None, None))) for i, name in enumerate(self._packs[0].names)]

    def gradients(self, leaves: Leaves, scale: float) -> OutgoingGradients:
        """Of the backward pass that this thread has started. `scale`: which they still have."""
        return OutgoingGradients(self._lane, self._packs, leaves, scale)


class OutgoingGradients:
    """The gradients of a batch, on the device until a gradient thread asks for them."""

    @torch.no_grad()
    def __init__(self, lane: Lane, packs: Sequence[_Pack], leaves: Leaves, scale: float) -> None:
        self._lane = lane
        self._names = [name for name, _ in leaves]
        self._absent = {name for name, leaf in leaves if leaf is None}
        # In float32, as the native sums: the quotient of float64 may round otherwise.
        self._inverse_scale = float(np.float32(1.0) / np.float32(scale))
        gradients = [None if leaf is None else leaf.grad for _, leaf in leaves]
        self._present = {i for i, gradient in enumerate(gradients) if gradient is not None}
        blocks = [block for pack in packs for block in pack.blocks]
        self._blocks = [block for block in blocks if self._present.intersection(block.slots)]
        self._alone = sorted(self._present.difference(*(block.slots for block in blocks)))
        alone = [gradient for i in self._alone if (gradient := gradients[i]) is not None]
        self._shapes = [gradient.shape for gradient in alone]
        # Copies, made before the loop does more: a hook may return the same buffer for each batch, and a CUDA
        # graph writes its gradients to the same memory. Not the leaves: their values end with the batch.
        self._copies = [block.join(gradients) for block in self._blocks]
        if alone:
            self._copies.append(torch.cat([gradient.reshape(-1) for gradient in alone]))
        self._memory = [pack.sent.memory for pack in packs]
        self._mark = lane.mark()

    @torch.no_grad()
    def fetch(self) -> list[tuple[str, SlotGradient]]:
        """(slot, its gradient) of each leaf, on the host. Waits for the device. Called once."""
        taken: list[SlotGradient] = [None] * len(self._names)
        if not self._present:
            return self._of_slots(taken)
        with self._lane.behind(self._mark, [*self._copies, *self._memory]):
            pieces: list[torch.Tensor] = []
            for block, bags in zip(self._blocks, self._copies, strict=False):
                pieces += block.sum_by_row(bags, self._inverse_scale)
            pieces += self._copies[len(self._blocks) :]
            values = self._lane.fetch(torch.cat([piece.reshape(-1) for piece in pieces]))
        shapes = [piece.shape for piece in pieces[: 2 * len(self._blocks)]] + self._shapes
        arrays = _split(values, shapes)
        for block, sums, greatest in zip(self._blocks, arrays[0::2], arrays[1::2], strict=False):
            for slot, i in enumerate(block.slots):
                if i not in self._present:
                    continue
                rows = slice(block.first_rows[slot], block.first_rows[slot + 1])
                if np.isfinite(greatest[slot]):
                    taken[i] = (sums[rows], float(greatest[slot]))
                else:
                    # As on the host, the worker leaves the slot out. The sums need not show why: those of
                    # samples without IDs are nowhere.
                    taken[i] = np.full((block.batch_size, block.dim), np.nan, np.float32)
        for i, array in zip(self._alone, arrays[2 * len(self._blocks) :], strict=True):
            taken[i] = array
        # Memory of the device, while the servers are waited for.
        self._blocks, self._copies, self._memory = [], [], []
        return self._of_slots(taken)

    def _of_slots(self, taken: list[SlotGradient]) -> list[tuple[str, SlotGradient]]:
        pairs = zip(self._names, taken, strict=True)
        return [pair for pair in pairs if pair[0] not in self._absent]


def _split(values: NDArray[np.float32], shapes: Sequence[torch.Size]) -> list[NDArray[np.float32]]:
    ends = np.cumsum([shape.numel() for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(values, ends[:-1]), shapes, strict=True)]


def _sum_bags(rows: torch.Tensor, numbers: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Of each bag its rows' sum, from the first to the last."""
    if not len(numbers):  # no row: torch wants one
        return rows.new_zeros(len(offsets) - 1, rows.shape[1])
    return torch.nn.functional.embedding_bag(numbers, rows, offsets, mode="sum", include_last_offset=True)


def _view(memory: torch.Tensor, place: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The array that begins at byte `place` of the memory, related to no other tensor for autograd."""
    view = torch.empty(0, dtype=dtype, device=memory.device)
    view.set_(memory.untyped_storage(), place // view.element_size(), torch.Size(shape))  # type: ignore[call-overload]
    return view
