"""What a loader pays to build a batch and to encode it, from each form that its IDs may have.

`python -m benchmarks.batches` prints milliseconds: the least and the median of the repetitions, because on a
shared machine the least is nearest to what the work costs. The forms take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from benchmarks.arguments import whole
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, PersiaBatch

Build = Callable[[], object]


def builders(batch_size: int, num_features: int) -> dict[str, Build]:
    """By form, a function that builds the batch of the same IDs; and one that encodes it."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2**63, (num_features, batch_size)).astype(np.uint64)
    weights = rng.random((num_features, batch_size)).astype(np.float32)
    offsets = np.arange(batch_size + 1, dtype=np.uint32)
    samples = [[row[i : i + 1].copy() for i in range(batch_size)] for row in ids]
    strings = [[f"user {i}" for i in row] for row in ids]
    labels = [Label(np.zeros((batch_size, 1), np.float32))]
    names = [f"feature {number}" for number in range(num_features)]

    def batch(make: Callable[[str, int], IDTypeFeature]) -> Callable[[], PersiaBatch]:
        return lambda: PersiaBatch([make(name, i) for i, name in enumerate(names)], labels=labels)

    forms: dict[str, Callable[[], PersiaBatch]] = {
        "compressed rows": batch(lambda name, i: IDTypeFeature.from_csr(name, ids[i], offsets)),
        "compressed rows, weights": batch(
            lambda name, i: IDTypeFeature.from_csr(name, ids[i], offsets, weights[i])
        ),
        "single IDs": batch(lambda name, i: IDTypeFeatureWithSingleID(name, ids[i])),
        "lists of arrays": batch(lambda name, i: IDTypeFeature(name, samples[i])),
        "strings": batch(lambda name, i: IDTypeFeature.from_strings(name, strings[i])),
    }
    built = forms["compressed rows"]()
    return {**forms, "encoding": lambda: built.encode_id_features()}


def measure(functions: dict[str, Build], repetitions: int) -> dict[str, list[float]]:
    """Seconds by name, sorted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repetitions):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return {name: sorted(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=whole(1), default=4096)
    parser.add_argument("--features", type=whole(1), default=26)
    parser.add_argument("--repetitions", type=whole(1), default=50)
    options = parser.parse_args()
    print(f"{options.batch_size} samples, {options.features} features of one ID each")
    times = measure(builders(options.batch_size, options.features), options.repetitions)
    for name, found in times.items():
        print(f"{name:25} {found[0] * 1e3:8.2f} ms least, {found[len(found) // 2] * 1e3:8.2f} ms median")


if __name__ == "__main__":
    main()
