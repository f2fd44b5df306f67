"""The loops that are measured: each is a generator that has trained one batch whenever it yields."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.servers import Servers
from benchmarks.gpu.traffic import EPS, LEARNING_RATE, Case, Traffic, new_model
from benchmarks.systems import UnavailableError
from benchmarks.workload import Batch
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import Adagrad
from persia.job import batch_pipeline
from persia.pipeline.backend import EmbeddingBackend

__all__ = ["SYSTEMS", "UnavailableError"]

Loop = Callable[[Traffic, torch.device], contextlib.AbstractContextManager[Iterator[object]]]


class _Batches(IterableDataset):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__(buffer_size=10)
        self._made = [_features(traffic, batch) for batch in traffic.batches]

    def __iter__(self) -> Iterator[PersiaBatch]:
        for features, dense, labels in itertools.cycle(self._made):
            yield PersiaBatch(
                features, non_id_type_features=[NonIDTypeFeature(dense)], labels=[Label(labels)]
            )


def _features(traffic: Traffic, batch: Batch) -> Any:
    single = traffic.case.ids_per_sample == 1
    features = [
        IDTypeFeatureWithSingleID(f"s{i}", ids) if single else IDTypeFeature.from_csr(f"s{i}", ids, offsets)
        for i, (ids, offsets) in enumerate(traffic.ids(batch))
    ]
    return features, batch.dense, batch.labels


def _slots(case: Case) -> dict[str, Any]:
    return {"slots_config": {f"s{i}": {"dim": case.dim} for i in range(case.num_slots)}}


@contextlib.contextmanager
def persia(
    traffic: Traffic, device: torch.device, backend: EmbeddingBackend | None = None
) -> Iterator[Iterator[object]]:
    """The embedded engine, or servers behind `backend`."""
    case = traffic.case
    model = new_model(case).to(device)
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=LEARNING_RATE, eps=EPS),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.01, 0.01), seed=1),
        mixed_precision=False,
        device_id=device.index if device.type == "cuda" else None,
        slots=_slots(case),
        backend=backend,
    ) as ctx:

        def steps() -> Generator[object, None, None]:
            for batch in DataLoader(_Batches(traffic)):
                output, labels = ctx.forward(batch)
                assert labels is not None
                yield ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
            raise AssertionError("the batches have no end")

        loop = steps()
        try:
            yield loop
        finally:
            loop.close()


@contextlib.contextmanager
def persia_by_slot(traffic: Traffic, device: torch.device) -> Iterator[Iterator[object]]:
    """Embeddings pooled on the host, and a copy for each slot and direction: how persia did it before."""
    with mock.patch.object(batch_pipeline, "lane_of", return_value=None), persia(traffic, device) as loop:
        yield loop


@contextlib.contextmanager
def persia_servers(traffic: Traffic, device: torch.device) -> Iterator[Iterator[object]]:
    """An embedding worker and two parameter servers in a process of their own, behind sockets."""
    with (
        Servers(_slots(traffic.case)) as client,
        persia(traffic, device, EmbeddingBackend(client, deadline_s=60.0)) as loop,
    ):
        yield loop


def _on_tables(
    traffic: Traffic,
    device: torch.device,
    look_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    step: Callable[[], None] = lambda: None,
    *,
    one_table: bool,
) -> Iterator[object]:
    """The same model over `look_up(rows, offsets)`: [slots, batch, dim]."""
    model = new_model(traffic.case).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    pinned = [
        [
            _pinned(torch.from_numpy(array), device)
            for array in (*traffic.rows(batch, one_table=one_table), batch.dense, batch.labels)
        ]
        for batch in traffic.batches
    ]
    for tensors in itertools.cycle(pinned):
        rows, offsets, dense, labels = (tensor.to(device, non_blocking=True) for tensor in tensors)
        output = model([dense], list(look_up(rows, offsets).unbind(0)))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        step()
        yield loss


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


@contextlib.contextmanager
def _torch(traffic: Traffic, device: torch.device, sparse: bool) -> Iterator[Iterator[object]]:
    case = traffic.case
    table = torch.nn.EmbeddingBag(
        case.num_slots * case.cardinality,
        case.dim,
        mode="sum",
        sparse=sparse,
        include_last_offset=True,
        device=device,
    )
    torch.nn.init.uniform_(table.weight, -0.01, 0.01)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=LEARNING_RATE, eps=EPS)

    def look_up(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = table(rows, offsets)
        return pooled.view(case.num_slots, case.batch_size, case.dim)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    yield _on_tables(traffic, device, look_up, step, one_table=True)


@contextlib.contextmanager
def torch_sparse(traffic: Traffic, device: torch.device) -> Iterator[Iterator[object]]:
    """One `torch.nn.EmbeddingBag` for all slots, in the device's memory, with sparse gradients."""
    with _torch(traffic, device, sparse=True) as loop:
        yield loop


@contextlib.contextmanager
def torch_dense(traffic: Traffic, device: torch.device) -> Iterator[Iterator[object]]:
    """The same with dense gradients: each step updates every row."""
    with _torch(traffic, device, sparse=False) as loop:
        yield loop


@contextlib.contextmanager
def fbgemm(traffic: Traffic, device: torch.device) -> Iterator[Iterator[object]]:
    """fbgemm's table-batched embedding, which torchrec trains with, in the device's memory."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except (ImportError, OSError) as failure:
        raise UnavailableError(f"fbgemm is not installed: {failure}") from failure
    case, on_gpu = traffic.case, device.type == "cuda"
    place = (
        (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        if on_gpu
        else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    )
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(case.cardinality, case.dim, *place)] * case.num_slots,
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        pooling_mode=PoolingMode.SUM,
        device=device,
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)

    def look_up(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = tables(rows, offsets)  # [batch, slots x dim]
        return pooled.view(case.batch_size, case.num_slots, case.dim).transpose(0, 1)

    yield _on_tables(traffic, device, look_up, one_table=False)


SYSTEMS: dict[str, Loop] = {
    "persia": persia,
    "persia, a copy a slot": persia_by_slot,
    "persia, servers": persia_servers,
    "torch, sparse": torch_sparse,
    "torch, dense": torch_dense,
    "fbgemm": fbgemm,
}
