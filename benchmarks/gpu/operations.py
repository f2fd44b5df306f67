"""`python -m benchmarks.gpu.operations`: ways to sum gradients by row on a CUDA device, in microseconds."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.arguments import dim, whole
from benchmarks.workload import zipf_ranks

NUM_SLOTS, CARDINALITY, EXPONENT = 26, 100_000, 1.1
REPETITIONS = 20

Operation = Callable[[], object]


def row_numbers(batch_size: int) -> torch.Tensor:
    """Of one ID a sample and slot: int32 [slots x batch], slot after slot. Slots share no row."""
    random, found, first = np.random.default_rng(0), [], 0
    for _ in range(NUM_SLOTS):
        rows, numbers = np.unique(zipf_ranks(random, CARDINALITY, EXPONENT, batch_size), return_inverse=True)
        found.append(numbers + first)
        first += len(rows)
    return torch.from_numpy(np.concatenate(found).astype(np.int32))


def operations(numbers: torch.Tensor, width: int) -> dict[str, Operation]:
    num_rows = int(numbers.max()) + 1
    gradients = torch.ones(len(numbers), width, device=numbers.device)
    in_order, users = numbers.sort(stable=True)
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=numbers.device)
    begins = torch.searchsorted(in_order, rows)
    short_users, short_begins, wide = users.int(), begins.int(), numbers.long()
    host = torch.empty(num_rows, width, pin_memory=numbers.is_cuda)
    sums = torch.empty(num_rows, width, device=numbers.device)

    def bags(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding_bag(
            indices, gradients, offsets, mode="sum", include_last_offset=True
        )

    return {
        "stable sort of the row numbers": lambda: numbers.sort(stable=True),
        "embedding_bag, 32-bit indices": lambda: bags(short_users, short_begins),
        "embedding_bag, 64-bit indices": lambda: bags(users, begins),
        "index_add": lambda: torch.zeros_like(sums).index_add_(0, numbers, gradients),
        "embedding_dense_backward": lambda: torch.ops.aten.embedding_dense_backward(
            gradients, wide, num_rows, -1, False
        ),
        "copy of the sums to the host": lambda: host.copy_(sums, non_blocking=True),
    }


def microseconds(operation: Operation) -> float:
    for _ in range(3):
        operation()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPETITIONS):
        operation()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / REPETITIONS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=whole(1), default=4096)
    parser.add_argument("--dim", type=dim, default=16)
    options = parser.parse_args()
    numbers = row_numbers(options.batch_size).to("cuda")
    for name, operation in operations(numbers, options.dim).items():
        print(f"{name:32} {microseconds(operation):8.1f}")


if __name__ == "__main__":
    main()
