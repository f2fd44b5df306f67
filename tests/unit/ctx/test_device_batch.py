"""What a batch goes through with a device, on the CPU, where it must give the bits of training without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.pipeline import lookup
from persia.pipeline.device_batch import Lane, OutgoingGradients, lane_of

CPU = torch.device("cpu")
BATCH, STEPS = 33, 6
SLOTS: dict[str, Any] = {
    "feature_index_prefix_bit": 8,
    "slots_config": {
        "single": {"dim": 4},
        "single 2": {"dim": 4},
        "wide": {"dim": 24},
        "many": {"dim": 4},
        "root": {"dim": 4, "sqrt_scaling": True},
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


def lists(rng: np.random.Generator, most: int, vocabulary: int) -> list[np.ndarray[Any, Any]]:
    return [rng.integers(0, vocabulary, rng.integers(0, most + 1)).astype(np.uint64) for _ in range(BATCH)]


def make_batch(number: int) -> PersiaBatch:
    rng = np.random.default_rng(number)

    def ids(name: str) -> list[np.ndarray[Any, Any]]:
        if name.startswith("single"):
            return [np.array([i], np.uint64) for i in rng.zipf(1.3, BATCH) % 100]
        if name == "empty":
            return [np.empty(0, np.uint64)] * BATCH
        return lists(rng, 8 if name == "hot" else 4, 3 if name == "hot" else 50)

    features = []
    for name in NAMES:
        samples = ids(name)
        weights = None
        if name == "weighted":
            weights = [rng.normal(size=len(sample)).astype(np.float32) for sample in samples]
        features.append(IDTypeFeature(name, samples, weights=weights))
    dense = rng.normal(size=(BATCH, 3)).astype(np.float32)
    return PersiaBatch(
        features,
        non_id_type_features=[NonIDTypeFeature(dense), NonIDTypeFeature(dense[:, :1] > 0)],
        labels=[Label(rng.normal(size=(BATCH, 1)).astype(np.float32))],
    )


class Batches(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        return map(make_batch, range(STEPS))


class Model(torch.nn.Module):
    def __init__(self, unused: str | None = None) -> None:
        super().__init__()
        dims = {name: slot["dim"] for name, slot in SLOTS["slots_config"].items()} | {"raw": 3 * 7}
        self._used = [name for name in NAMES if name != unused]
        self.layer = torch.nn.Linear(4 + sum(dims[name] for name in self._used), 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        by_name = dict(zip(NAMES, embeddings, strict=True))
        used = [by_name[name].flatten(1) for name in self._used]
        output: torch.Tensor = self.layer(torch.cat([*(d.float() for d in dense), *used], dim=1))
        return output


def trained(slots: dict[str, Any], unused: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """All that training computes: losses, dense weights, rows by slot; and counts."""
    torch.manual_seed(0)
    model = Model(unused)
    losses = []
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.5, 0.5), seed=1),
        slots=slots,
        **kwargs,
    ) as ctx:
        for batch in DataLoader(Batches(buffer_size=3), reproducible=True, embedding_staleness=1):
            output, labels = ctx.forward(batch)
            assert labels is not None
            loss = (output - labels[0]).square().mean()
            ctx.backward(loss)
            losses.append(loss.item())
        with eval_ctx() as evaluation:
            found = evaluation.get_embedding_from_data(make_batch(0))
            rows = [tensor.numpy().copy() for tensor in found.consume_all_id_type_feature_embedding_tensors()]
        counters = ctx.counters
    return {
        "losses": losses,
        "weights": [p.detach().numpy() for p in model.parameters()],
        "rows": rows,
        "counts": (counters.batches_trained, counters.nonfinite_slots, counters.skipped_slots),
    }


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Called, it makes the jobs that follow use the path of devices; what it returns counts batches sent."""

    class Counting(Lane):
        def send(self, host: torch.Tensor) -> Any:
            sent.append(len(host))
            return super().send(host)

    sent: list[int] = []

    def use() -> list[int]:
        lane = Counting(CPU)
        monkeypatch.setattr(lookup, "lane_of", lambda device: lane)
        return sent

    return use


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["counts"] == expected["counts"]
    assert found["losses"] == expected["losses"]
    for key in ("weights", "rows"):
        for name, ours, theirs in zip(NAMES, found[key], expected[key], strict=False):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{key} {name}")


def clip(name: str, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"mixed_precision": "fp16"}, id="scaled"),
        pytest.param({"on_embedding_gradient": clip}, id="hook"),
        pytest.param({"unused": "root"}, id="slot-without-gradient"),
        pytest.param({"synchronous": ["single", "raw", "hot"]}, id="synchronous-slots"),
    ],
)
def test_a_device_computes_what_training_without_one_does(
    options: dict[str, Any], on_device: Callable[[], list[int]]
) -> None:
    options = dict(options)
    slots = {**SLOTS, "slots_config": {name: dict(slot) for name, slot in SLOTS["slots_config"].items()}}
    for name in (synchronous := options.pop("synchronous", ())):
        slots["slots_config"][name]["consistency"] = "synchronous"
    expected = trained(slots, **options)
    sent = on_device()
    found = trained(slots, **options)
    assert len(sent) == STEPS * (2 if synchronous else 1) + 1
    assert_same(found, expected)


def test_a_slot_whose_gradient_is_not_finite_is_left_out_alone(on_device: Callable[[], list[int]]) -> None:
    def poison(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        if name not in ("single", "hot", "raw"):
            return None
        spoiled = gradient.clone()
        spoiled[-1, 0] = {"single": float("nan"), "hot": float("inf"), "raw": float("-inf")}[name]
        return spoiled

    expected = trained(SLOTS, on_embedding_gradient=poison)
    on_device()
    found = trained(SLOTS, on_embedding_gradient=poison)
    assert found["counts"][1] > 2 * STEPS
    assert_same(found, expected)


def test_gradients_that_overflow_in_their_sum_leave_their_slot_out(on_device: Callable[[], list[int]]) -> None:
    def grow(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        return torch.full_like(gradient, 3e38) if name in ("hot", "many") else None

    expected = trained(SLOTS, on_embedding_gradient=grow)
    on_device()
    found = trained(SLOTS, on_embedding_gradient=grow)
    assert found["counts"][1] == 2 * STEPS
    assert_same(found, expected)


def test_only_devices_have_a_lane() -> None:
    assert lane_of(None) is None
    assert lane_of(CPU) is None


def test_gradients_of_no_leaf_are_none() -> None:
    leaves = [("a", torch.zeros(2, 3)), ("b", torch.zeros(2, 3))]
    assert OutgoingGradients(Lane(CPU), [], leaves, 1.0).fetch() == [("a", None), ("b", None)]
