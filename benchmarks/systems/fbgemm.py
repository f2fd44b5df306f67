"""fbgemm's table-batched embedding on the CPU: all slots in one call, the update fused into the backward."""

from __future__ import annotations

from typing import Any

import fbgemm_gpu
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.cases import LEARNING_RATE, Case
from benchmarks.systems.base import UnavailableError
from benchmarks.systems.torch_system import TorchSystem
from benchmarks.workload import Batch, row_numbers

__all__ = ["Fbgemm"]

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class Fbgemm(TorchSystem):
    """Dense arrays in host memory; "exact" optimizers add up an ID's gradients before they apply them."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if case.optimizer not in _OPTIMIZERS:
            raise UnavailableError(f"fbgemm {fbgemm_gpu.__version__} has no {case.optimizer} on the CPU")
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in case.table_rows],
            optimizer=_OPTIMIZERS[case.optimizer],
            learning_rate=LEARNING_RATE,
            eps=1e-10,
            pooling_mode=PoolingMode.SUM,
        )
        self._tables.init_embedding_weights_uniform(-0.01, 0.01)

    def prepare_ids(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = np.concatenate([[0], batch.lengths.ravel().cumsum()])
        return torch.from_numpy(row_numbers(batch, self.case.table_rows)), torch.from_numpy(offsets)

    def pooled(self, ids: Any) -> torch.Tensor:
        pooled: torch.Tensor = self._tables(*ids)
        return pooled

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "fbgemm-gpu-cpu": fbgemm_gpu.__version__}
