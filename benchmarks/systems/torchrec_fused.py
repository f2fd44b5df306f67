"""torchrec's `FusedEmbeddingBagCollection`, unsharded: fbgemm's tables behind keyed jagged tensors."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.cases import LEARNING_RATE, Case
from benchmarks.systems.base import UnavailableError
from benchmarks.systems.torch_system import TorchSystem
from benchmarks.workload import Batch, row_numbers

__all__ = ["TorchrecFused"]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


class TorchrecFused(TorchSystem):
    """The keyed jagged tensors are made beforehand."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if case.optimizer not in _OPTIMIZERS:
            raise UnavailableError(f"torchrec's fused collection has no {case.optimizer} on the CPU")
        self._slots = [f"f{slot}" for slot in range(case.workload.num_slots)]
        self._collection = FusedEmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=f"table_{slot}",
                    embedding_dim=case.dim,
                    num_embeddings=rows,
                    feature_names=[slot],
                    weight_init_min=-0.01,
                    weight_init_max=0.01,
                )
                for slot, rows in zip(self._slots, case.table_rows, strict=True)
            ],
            optimizer_type=_OPTIMIZERS[case.optimizer],
            optimizer_kwargs={"lr": LEARNING_RATE},
            device=torch.device("cpu"),
        )

    def prepare_ids(self, batch: Batch) -> KeyedJaggedTensor:
        keyed = KeyedJaggedTensor(
            keys=self._slots,
            values=torch.from_numpy(row_numbers(batch, self.case.table_rows)),
            lengths=torch.from_numpy(batch.lengths.ravel()),
        )
        keyed.offsets()  # computed once and kept
        return keyed

    def pooled(self, ids: Any) -> torch.Tensor:
        pooled: torch.Tensor = self._collection(ids).values()
        return pooled

    def versions(self) -> dict[str, str]:
        return {
            **super().versions(),
            "torchrec": version("torchrec"),
            "fbgemm-gpu-cpu": version("fbgemm-gpu-cpu"),
        }
