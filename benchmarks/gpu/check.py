"""Whether a device computes the values of the CPU, while copies and kernels of many batches overlap.

`python -m benchmarks.gpu.check` compares embeddings, dense features, and the sums of gradients. Slots of all
kinds are looked up; the device is made to lag behind the host, so that a copy that nothing waits for, or
memory that is used again too early, shows in the values. The two zeros are equal: a device may drop a sign.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.arguments import whole
from persia import _native
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.dense_codec import decode_dense
from persia.job.embedded import read_slots
from persia.pipeline.device_batch import DeviceBatch, Lane, lane_of

__all__ = ["NAMES", "SLOTS", "differences", "make_batch"]

SLOTS: dict[str, Any] = {
    "feature_index_prefix_bit": 8,
    "slots_config": {
        "single": {"dim": 4},
        "single 2": {"dim": 4},
        "wide": {"dim": 24},
        "many": {"dim": 4},
        "root": {"dim": 4, "sqrt_scaling": True},
        "mean": {"dim": 24, "mean_scaling": True},
        "hot": {"dim": 24},
        "stacked": {"dim": 4, "hash_stack_config": {"hash_stack_rounds": 3, "embedding_size": 40}},
        "stacked root": {
            "dim": 4,
            "sqrt_scaling": True,
            "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 40},
        },
        "empty": {"dim": 24},
        "raw": {"dim": 6, "embedding_summation": False, "sample_fixed_size": 3},
        "weighted": {"dim": 4},
        "shared": {"dim": 4},
        "shared 2": {"dim": 4},
    },
    "feature_groups": {"both": ["shared", "shared 2"]},
}
NAMES = list(SLOTS["slots_config"])

_THREADS, _AHEAD = 4, 12
_LAG_CYCLES = 2_000_000  # about a millisecond


def make_batch(number: int, batch_size: int = 33) -> PersiaBatch:
    rng = np.random.default_rng(number)

    def ids(name: str) -> list[NDArray[np.uint64]]:
        if name.startswith("single"):
            return [np.array([i], np.uint64) for i in rng.zipf(1.3, batch_size) % 100]
        if name == "empty":
            return [np.empty(0, np.uint64)] * batch_size
        most, vocabulary = (8, 3) if name == "hot" else (4, 50)
        return [
            rng.integers(0, vocabulary, rng.integers(0, most + 1)).astype(np.uint64)
            for _ in range(batch_size)
        ]

    features = []
    for name in NAMES:
        samples = ids(name)
        weights = None
        if name == "weighted":
            weights = [rng.normal(size=len(sample)).astype(np.float32) for sample in samples]
        features.append(IDTypeFeature(name, samples, weights=weights))
    dense = rng.normal(size=(batch_size, 3)).astype(np.float32)
    return PersiaBatch(
        features,
        non_id_type_features=[NonIDTypeFeature(dense), NonIDTypeFeature(dense[:, :1] > 0)],
        labels=[Label(rng.normal(size=(batch_size, 1)).astype(np.float32))],
    )


Results = list[tuple[str, NDArray[Any]]]  # what was computed of a batch


@torch.no_grad()
def _trained(lane: Lane, batch: DeviceBatch, scale: float, requires_grad: bool) -> tuple[Results, Any]:
    """Embeddings and dense tensors, read when the caller waits; and the gradients on their way."""
    if lane.device.type == "cuda":
        torch.cuda._sleep(_LAG_CYCLES)  # type: ignore[no-untyped-call]
    looked_up = batch.embeddings(requires_grad=requires_grad)
    found = [(name, leaf) for name, leaf, _ in looked_up if leaf is not None]
    leaves = []
    for name, leaf in found:
        copy = leaf.detach().requires_grad_()
        copy.grad = torch.where(leaf > 0, leaf * 3, leaf * leaf)  # exact in any order of operations
        leaves.append((name, copy))
    gradients = batch.gradients(leaves, scale)
    values = [*found, *(("dense", tensor) for tensor in (*batch.features(), *batch.labels()))]
    return [(name, tensor.detach().clone()) for name, tensor in values], gradients  # type: ignore[misc]


def _flat(gradients: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, gradient in gradients:
        sums, greatest = gradient if isinstance(gradient, tuple) else (gradient, 0.0)
        yield f"gradient of {name}", sums.copy()
        yield f"magnitude of {name}", np.array(greatest)


def differences(lane: Lane, num_batches: int, batch_size: int = 33) -> list[str]:
    """What differs between the lane's device and the CPU; empty: nothing."""
    config = read_slots(SLOTS)
    assert config is not None
    client = _native.EmbeddedClient(
        slots=config.native_slots(), feature_index_prefix_bit=config.feature_index_prefix_bit
    )
    client.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))
    on_cpu = Lane(torch.device("cpu"))
    pool = ThreadPoolExecutor(_THREADS)

    def look_up(number: int) -> tuple[DeviceBatch, DeviceBatch]:
        batch = make_batch(number, batch_size)
        dense = decode_dense(batch.encode_dense())
        message = batch.encode_id_features()
        result = client.lookup_direct(0, message, requires_grad=True, as_rows=True)
        client.release(result.reference)
        return DeviceBatch(lane, result, dense), DeviceBatch(on_cpu, result, dense)

    def compare(ours: Results, gradients: Any, theirs: Results, expected: Any) -> list[str]:
        found = [*((n, v.cpu().numpy()) for n, v in ours), *_flat(gradients.fetch())]  # type: ignore[attr-defined]
        wanted = [*((n, v.numpy()) for n, v in theirs), *_flat(expected.fetch())]  # type: ignore[attr-defined]
        return [
            name
            for (name, value), (_, right) in zip(found, wanted, strict=True)
            if not np.array_equal(value, right)
        ]

    with pool:
        for number in range(num_batches):  # rows exist from here on, so that lookups change nothing
            look_up(number)
        ahead = [pool.submit(look_up, number) for number in range(min(_AHEAD, num_batches))]
        compared = []
        for number in range(num_batches):
            batch, reference = ahead[number].result()
            ahead[number] = None  # type: ignore[call-overload]
            if number + _AHEAD < num_batches:
                ahead.append(pool.submit(look_up, number + _AHEAD))
            scale = float(1 << (number % 3)) * (3.0 if number % 2 else 1.0)
            ours = _trained(lane, batch, scale, requires_grad=number % 3 > 0)
            theirs = _trained(on_cpu, reference, scale, requires_grad=number % 3 > 0)
            compared.append(pool.submit(compare, *ours, *theirs))
            del batch, reference
        return [f"batch {i}: {name}" for i, done in enumerate(compared) for name in done.result()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=whole(1), default=100)
    parser.add_argument("--batch-size", type=whole(1), default=512)
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    found = differences(lane_of(device) or Lane(device), options.batches, options.batch_size)
    for line in found[:50]:
        print(line)
    slots = f"{len(NAMES)} slots of all kinds"
    print(f"{options.batches} batches of {options.batch_size} samples, {slots}: {len(found)} values differ")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
