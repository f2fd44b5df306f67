"""One version of a model: a checkpoint's TorchScript with a source of embeddings; batches to predictions."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia._native import LookupResult
from persia.checkpoint.checkpoints import Source
from persia.embedding.data import PersiaBatch
from persia.errors import (
    CorruptionError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from persia.pipeline.batch import embedding_tensors, to_device
from persia.serving.embeddings import EmbeddingSource

JIT_DENSE_NAME = "jit_dense.pt"


class Predictor:
    """Answers batches with the outputs of `model(non_id_tensors, embedding_tensors)`. Thread-safe.

    ```python
    source = Source("model/")
    predictor = Predictor(load_script(source), EmbeddedRows(source, slots))
    predictions = predictor.predict(PersiaBatch.from_bytes(message))[0]    # float32 [batch, 1]
    ```
    """

    def __init__(
        self, model: torch.nn.Module, embeddings: EmbeddingSource, *, device: torch.device | None = None
    ) -> None:
        """`model` is put into evaluation mode, and on `device` (None: the CPU)."""
        self.embeddings = embeddings
        self._device = device
        self._model = model.to(device or "cpu").eval()

    def predict(self, batch: PersiaBatch) -> list[NDArray[Any]]:
        """The model's outputs, each [batch_size, ...], of the model's dtype (bfloat16 becomes float32).

        InvalidArgumentError: an unknown slot, or features that the model cannot take; labels are ignored.
        UnavailableError, DeadlineExceededError: the embeddings cannot be had now.
        """
        return self.compute(batch, self.look_up(batch))

    def look_up(self, batch: PersiaBatch) -> LookupResult:
        """The first half of `predict`: the rows as they are now, which later changes do not touch."""
        return self.embeddings.lookup(batch.encode_id_features())

    def compute(self, batch: PersiaBatch, result: LookupResult) -> list[NDArray[Any]]:
        """The second half of `predict`, with what `look_up` has given."""
        # Copied: the arrays are views of an immutable message, and a model may work in place.
        dense = [
            to_device(torch.from_numpy(np.array(feature.data)), self._device)
            for feature in batch.non_id_type_features
        ]
        rows = embedding_tensors(result, device=self._device, requires_grad=False).tensors
        try:
            with torch.inference_mode():
                outputs = self._model(dense, rows)
        except torch.cuda.OutOfMemoryError as failure:
            raise ResourceExhaustedError(f"no memory for {batch.batch_size} samples: {failure}") from failure
        # TorchScript raises these for a wrong number or shape of inputs, which the client can correct.
        except (RuntimeError, IndexError) as failure:
            raise InvalidArgumentError(
                f"the model cannot take this batch: it has {_described(batch, rows)}; torch says: "
                f"{str(failure).strip().splitlines()[-1]}"
            ) from failure
        return _arrays(outputs, batch.batch_size)


def load_script(source: Source, name: str = JIT_DENSE_NAME) -> torch.nn.Module:
    """The TorchScript of a checkpoint. NotFoundError says how to write one; CorruptionError."""
    try:
        content = source.dense(name)
    except LookupError as failure:
        raise type(failure)(
            f"{failure}; write it with ctx.dump_checkpoint(..., with_jit_model=True)"
        ) from failure
    return read_script(content, str(source.location / name))


def read_script(content: bytes, where: str) -> torch.nn.Module:
    """TorchScript that `torch.jit.save` wrote. CorruptionError names `where`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's: see persia.storage.dense
            model: torch.nn.Module = torch.jit.load(io.BytesIO(content), map_location="cpu")  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError, EOFError) as failure:
        raise CorruptionError(f"{where} is no TorchScript: {failure}") from failure
    return model


def _arrays(outputs: object, batch_size: int) -> list[NDArray[Any]]:
    listed: Sequence[object] = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    arrays = []
    for position, output in enumerate(listed):
        if not isinstance(output, torch.Tensor):
            raise FailedPreconditionError(
                f"output {position} of the model is a {type(output).__name__}: a served model returns a "
                "tensor, or a list or tuple of tensors"
            )
        if output.dim() == 0 or output.shape[0] != batch_size:
            raise FailedPreconditionError(
                f"output {position} of the model has shape {list(output.shape)} for {batch_size} samples: "
                "its first dimension must be the batch"
            )
        # numpy has no such dtype.
        if output.dtype is torch.bfloat16:
            output = output.float()
        arrays.append(np.ascontiguousarray(output.cpu().numpy()))
    return arrays


def _described(batch: PersiaBatch, rows: Sequence[torch.Tensor]) -> str:
    dense = [
        f"{feature.name} {feature.data.dtype}{list(feature.data.shape)}"
        for feature in batch.non_id_type_features
    ]
    slots = [
        f"{feature.name} {list(tensor.shape)}"
        for feature, tensor in zip(batch.id_type_features, rows, strict=True)
    ]
    return f"dense features [{', '.join(dense)}] and embeddings [{', '.join(slots)}]"
