"""What needs a CUDA device: its streams and copies, half precision, ranks over nccl. `./run gpu` runs it.

What is computed on a device is tested on the CPU: tests/unit/ctx/test_device_batch.py. Everything else of
training does not know where the tensors are, and is tested without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import check
from benchmarks.gpu.servers import Servers
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.device_batch import CudaLane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS, BATCH, DIM, FIXED = 20, 32, 8, 3
SLOTS = {
    "slots_config": {
        "pooled": {"dim": DIM},
        "raw": {"dim": DIM, "embedding_summation": False, "sample_fixed_size": FIXED},
    }
}


class Batches(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        rng = np.random.default_rng(1)
        for _ in range(STEPS):
            ids = [rng.integers(0, 50, rng.integers(0, 5)).astype(np.uint64) for _ in range(BATCH)]
            dense = rng.normal(size=(BATCH, 4)).astype(np.float32)
            yield PersiaBatch(
                [IDTypeFeature("pooled", ids), IDTypeFeature("raw", ids)],
                non_id_type_features=[NonIDTypeFeature(dense)],
                labels=[Label(dense[:, :1] + np.array([[len(sample)] for sample in ids], np.float32))],
            )


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = 4 + DIM + FIXED * (DIM + 1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(size, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.devices: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        pooled, raw = embeddings
        self.devices |= {tensor.device.type for tensor in (*dense, pooled, raw)}
        output: torch.Tensor = self.layers(torch.cat([dense[0], pooled, raw.flatten(1)], dim=1))
        self.dtypes.add(output.dtype)
        return output


def trained(device_id: int | None, mixed_precision: Any) -> tuple[list[float], np.ndarray[Any, Any], Model]:
    """The losses, and the embeddings of the first batch after training."""
    torch.manual_seed(2)
    model = Model() if device_id is None else Model().cuda(device_id)
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.05),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.1, 0.1), seed=3),
        mixed_precision=mixed_precision,
        device_id=device_id,
        slots=SLOTS,
    ) as ctx:
        losses = []
        for batch in DataLoader(Batches(buffer_size=4), reproducible=True):
            output, labels = ctx.forward(batch)
            assert labels is not None
            loss = (output - labels[0]).square().mean()
            ctx.backward(loss)
            losses.append(loss.item())
        ctx.wait_for_gradients()  # the last ones may still be on the device
        assert (ctx.counters.batches_trained, ctx.counters.nonfinite_slots) == (STEPS, 0)
        with eval_ctx(model=model) as evaluation, torch.no_grad():
            batch = evaluation.get_embedding_from_data(next(iter(Batches(buffer_size=1))))
            _, embeddings, _ = evaluation.prepare_features(batch)
    return losses, embeddings[0].cpu().numpy(), model


@pytest.mark.parametrize(
    ("precision", "tolerance", "dtype"),
    [
        (False, 1e-3, torch.float32),
        (True, 1e-3, torch.float32),
        ("fp16", 0.05, torch.float16),
        ("bf16", 0.1, torch.bfloat16),
    ],
)
def test_a_gpu_learns_what_the_cpu_does(precision: Any, tolerance: float, dtype: torch.dtype) -> None:
    # Like with like: in float16 the first steps overflow at the scale that the scaler begins with, and the
    # dense model skips them. Without autocast the CPU has no half precision.
    on_cpu = precision if isinstance(precision, str) else False
    expected, expected_rows, _ = trained(None, on_cpu)
    losses, rows, model = trained(0, precision)
    assert (model.devices, model.dtypes) == ({"cuda"}, {dtype})
    assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(rows, expected_rows, rtol=tolerance, atol=tolerance)


def test_a_gradient_that_overflows_is_left_out_and_the_scale_falls() -> None:
    model = Model().cuda(0)
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.05),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
        mixed_precision="fp16",
        device_id=0,
        slots=SLOTS,
    ) as ctx:
        before = [p.detach().clone() for p in model.parameters()]
        output, _ = ctx.forward(ctx.get_embedding_from_data(next(iter(Batches(buffer_size=1)))))
        ctx.backward(output.sum() * 1e4)
        scaler = ctx._backward.scaler
        assert scaler is not None
        assert scaler.get_scale() == 2.0**16 / 4
        assert all(map(torch.equal, before, model.parameters()))
    assert ctx.counters.nonfinite_slots == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl wants a CUDA device for each rank")
def test_ranks_over_nccl_end_with_one_model(run_job: Any) -> None:
    reports = run_job("--cuda", nproc=2, loaders=[12, 8], parameter_servers=2).reports
    assert sum(report["counters"]["batches_trained"] for report in reports) == 20
    assert reports[0]["digest"] == reports[1]["digest"]


def test_copies_and_kernels_that_overlap_change_no_value() -> None:
    assert check.differences(CudaLane(torch.device("cuda", 0)), num_batches=100, batch_size=512) == []


class Checked(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        return map(check.make_batch, range(STEPS))


def trained_rows(device_id: int | None, backend: EmbeddingBackend | None) -> list[np.ndarray[Any, Any]]:
    """The embeddings of the first batch after training with a loss that every device computes to the bit."""
    model = torch.nn.Linear(1, 1)
    with TrainCtx(
        model=model if device_id is None else model.cuda(device_id),
        embedding_optimizer=Adagrad(lr=0.05),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.5, 0.5), seed=1),
        mixed_precision=False,
        device_id=device_id,
        slots=check.SLOTS,
        backend=backend,
    ) as ctx:
        for batch in DataLoader(Checked(buffer_size=4), reproducible=True):
            _, embeddings, _ = ctx.prepare_features(batch)
            ctx.backward(sum((tensor * tensor).sum() for tensor in embeddings) + 0 * model.weight.sum())
        ctx.wait_for_gradients()
        found = ctx.get_embedding_from_data(
            check.make_batch(0)
        ).consume_all_id_type_feature_embedding_tensors()
        return [tensor.detach().cpu().numpy() for tensor in found]


@pytest.mark.parametrize("embedded", [True, False])
def test_embeddings_trained_with_a_gpu_are_those_of_the_cpu(embedded: bool) -> None:
    def run(device_id: int | None) -> list[np.ndarray[Any, Any]]:
        if embedded:
            return trained_rows(device_id, None)
        with Servers(check.SLOTS) as client:
            return trained_rows(device_id, EmbeddingBackend(client, deadline_s=60.0))

    for name, ours, theirs in zip(check.NAMES, run(0), run(None), strict=True):
        # Autograd adds up a raw slot's gradients on the device, in any order.
        tolerance = 1e-5 if name == "raw" else 0
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance, err_msg=name)
