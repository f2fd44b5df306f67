"""Training in a steady state takes no more memory, and large outputs come from memory used before."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import torch

from persia.embedding.optim import Adagrad
from persia.nn import EmbeddingBagCollection


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def step(ebc: EmbeddingBagCollection, values: torch.Tensor, lengths: torch.Tensor) -> int:
    """Returns where the output lay."""
    pooled = ebc(values, lengths)
    pooled.backward(torch.ones_like(pooled))
    return pooled.data_ptr()


def test_memory_is_flat_over_many_steps() -> None:
    ebc = EmbeddingBagCollection({"a": 8, "b": 4}, optimizer=Adagrad(), num_threads=1)
    lengths = torch.tensor([[1, 1, 1, 1], [2, 0, 1, 1]])
    batches = [torch.randint(0, 1000, (8,)) for _ in range(50)]
    for i in range(2_000):
        step(ebc, batches[i % 50], lengths)
    for _ in range(3):  # what is lost in a step is lost in every round; the heap may grow in one, for others
        gc.collect()
        before = resident_bytes()
        for i in range(20_000):
            step(ebc, batches[i % 50], lengths)
            if i % 10 == 0:
                ebc(batches[0], lengths)  # dropped without a gradient
        gc.collect()
        growth = resident_bytes() - before
        if growth < 1 << 20:
            break
    # 100 bytes lost in a step would be twice as much.
    assert growth < 1 << 20


def test_large_outputs_are_used_again() -> None:
    ebc = EmbeddingBagCollection({"a": 64, "b": 64}, optimizer=Adagrad(), num_threads=1)
    size, steps = 4096, 50
    values, lengths = torch.randint(0, 1000, (2 * size,)), torch.ones(2, size, dtype=torch.int64)
    gradient = torch.ones(size, ebc.out_features)

    def train() -> int:
        pooled = ebc(values, lengths)
        pooled.backward(gradient)
        return pooled.data_ptr()

    for _ in range(5):
        train()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    places = {train() for _ in range(steps)}
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert len(places) == 1
    # Fresh memory would cost a fault for each of the output's 512 pages, in every step.
    assert faults < steps


def test_an_output_stays_as_it_is_while_it_is_held() -> None:
    ebc = EmbeddingBagCollection({"a": 64}, optimizer=Adagrad(lr=1.0), num_threads=1)
    lengths = torch.ones(1, 4096, dtype=torch.int64)
    held = ebc(torch.arange(4096), lengths).detach()  # a view: what made it is gone
    copy = held.clone()
    for start in range(3):
        assert step(ebc, torch.arange(start, start + 4096), lengths) != held.data_ptr()
    assert torch.equal(held, copy)
