"""One version of a model: how it is loaded from a checkpoint, and how it turns batches into predictions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia import _native
from persia._native import LookupResult
from persia.checkpoint.checkpoints import Source
from persia.config import SlotsConfig
from persia.embedding.data import PersiaBatch, split_batches
from persia.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.packets.follower import FollowOptions
from persia.pipeline.batch import EmbeddingTensors, embedding_tensors, to_device
from persia.pipeline.dense_ids import DenseIds
from persia.serving.embeddings import EmbeddedRows, EmbeddingSource
from persia.serving.gate import Gate
from persia.serving.scripts import load_script
from persia.storage.dense import named, takes_names
from persia.storage.dense_slots import DenseSlots
from persia.storage.location import Location
from persia.storage.manifest import Manifest
from persia.storage.signature import Signature, arranged, require_finite


class Predictor:
    """Answers batches with the outputs of `model(non_id_tensors, embedding_tensors)`. Thread-safe.

    ```python
    source = Source("model/")
    predictor = Predictor(load_script(source), EmbeddedRows(source, slots), signature=source.signature)
    predictions = predictor.predict(PersiaBatch.from_bytes(message))[0]    # float32 [batch, 1]
    ```
    """

    def __init__(
        self,
        model: torch.nn.Module,
        embeddings: EmbeddingSource,
        *,
        device: torch.device | None = None,
        signature: Signature | None = None,
        allow_nonfinite: bool = False,
    ) -> None:
        """Puts `model` into evaluation mode, and on `device` (None: the CPU). `embeddings` looks rows up.

        `signature` matches features by name (`Source.signature`); None: the model gets them in the batch's
        order, whatever their names. `allow_nonfinite` takes dense features with NaN or Inf.
        """
        self.embeddings = embeddings
        self.signature = signature
        self._device = device
        self._model = model.to(device or "cpu").eval()
        self._dense_slots = DenseSlots.find(model)
        self._takes_names = takes_names(model)
        self._allow_nonfinite = allow_nonfinite

    @property
    def id_limits(self) -> dict[str, int]:
        """The exclusive upper bound of the IDs of each slot in the dense model."""
        tables = {} if self._dense_slots is None else self._dense_slots.tables
        return {name: table.cardinality for name, table in tables.items()}

    def predict(self, batch: PersiaBatch) -> list[NDArray[Any]]:
        """The model's outputs, each [batch_size, ...], of the model's dtype (bfloat16 becomes float32).

        InvalidArgumentError: features that the model was not trained with, or NaN in one; labels are ignored.
        UnavailableError, DeadlineExceededError: the embeddings cannot be had now.
        """
        batch = self.checked(batch)
        return self.compute(batch, self.look_up(batch))

    def checked(self, batch: PersiaBatch) -> PersiaBatch:
        """The batch with its features in the order of training. InvalidArgumentError: it has others."""
        if self.signature is not None:
            batch = _arranged(self.signature, batch)
        if not self._allow_nonfinite:
            for feature in batch.non_id_type_features:
                require_finite(feature.name, feature.data)
        # Before requests are merged: a wrong ID must fail its own.
        tables = {} if self._dense_slots is None else self._dense_slots.tables
        for f in batch.id_type_features:
            if f.name in tables:
                tables[f.name].check(f.name, f.ids)
        return batch

    def _dense_ids(self, batch: PersiaBatch) -> dict[str, DenseIds]:
        """Of slots in the dense model. InvalidArgumentError: an ID beyond its slot."""
        assert self._dense_slots is not None, "the caller has looked"
        features = ((f.name, f.ids, f.offsets, f.weights) for f in batch.id_type_features)
        return self._dense_slots.reader.convert(features)

    def look_up(self, batch: PersiaBatch, source: EmbeddingSource | None = None) -> LookupResult | None:
        """The first half of `predict`: the rows as they are now, which later changes do not touch.

        `source`: of other rows than the predictor's. None: all slots are in the dense model.
        """
        dense = {} if self._dense_slots is None else self._dense_slots.tables
        features = [f for f in batch.id_type_features if f.name not in dense]
        if not features:
            return None
        message = _native.encode_id_features(
            batch.batch_size, [(f.name, f.ids, f.offsets, f.weights) for f in features]
        )
        return (source or self.embeddings).lookup(message)

    def compute(self, batch: PersiaBatch, result: LookupResult | None) -> list[NDArray[Any]]:
        """The second half of `predict`, with what `look_up` has given for a `checked` batch."""
        # Copied: the arrays are views of an immutable message, and a model may work in place.
        dense = [
            to_device(torch.from_numpy(np.array(feature.data)), self._device)
            for feature in batch.non_id_type_features
        ]
        rows = self._embeddings(batch, result)
        inputs: tuple[Any, Any] = (dense, rows)
        if self._takes_names:
            inputs = (
                named([feature.name for feature in batch.non_id_type_features], dense),
                named([feature.name for feature in batch.id_type_features], rows),
            )
        try:
            with torch.inference_mode():
                outputs = self._model(*inputs)
        except torch.cuda.OutOfMemoryError as failure:
            raise ResourceExhaustedError(f"no memory for {batch.batch_size} samples: {failure}") from failure
        # TorchScript raises these for a wrong number or shape of inputs, which the client can correct.
        except (RuntimeError, IndexError) as failure:
            raise InvalidArgumentError(
                f"the model cannot take this batch: it has {_described(batch, rows)}; torch says: "
                f"{str(failure).strip().splitlines()[-1]}"
            ) from failure
        return _arrays(outputs, batch.batch_size)

    def _embeddings(self, batch: PersiaBatch, result: LookupResult | None) -> list[torch.Tensor]:
        found = EmbeddingTensors()
        if result is not None:
            found = embedding_tensors(result, device=self._device, requires_grad=False)
        if self._dense_slots is None:
            return found.tensors
        names = [feature.name for feature in batch.id_type_features]
        by_name = dict(zip(found.names, found.tensors, strict=True))
        rows = [by_name.get(name, torch.empty(0)) for name in names]
        with torch.inference_mode():
            return self._dense_slots.fill(names, self._dense_ids(batch), rows)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is served."""

    name: str
    location: Location  # a checkpoint, or a directory of checkpoints with its `latest`
    slots: SlotsConfig | None = None  # of rows that are loaded into this process
    embeddings: EmbeddingSource | None = None  # remote rows; None: those of the checkpoint, with `slots`
    default_rows: EmbeddingSource | None = None  # answer while remote rows cannot be had; None: nothing does
    device: torch.device | None = None
    sample: bytes | None = None  # batches that a version must answer before it is used
    gate: Gate | None = None  # what a version must predict that does not continue the one in use
    poll_s: float = 1.0  # between two looks for a new version
    follow: FollowOptions | None = None  # packets to apply between checkpoints
    servers: Sequence[str] = ()  # of remote rows: "host:port" of the status of each parameter server
    allow_nonfinite: bool = False  # answers requests with NaN or Inf in dense features

    def predictor(
        self, model: torch.nn.Module, embeddings: EmbeddingSource, signature: Signature | None
    ) -> Predictor:
        """Of one version."""
        if signature is None:
            _warn_of_positions(self.name)
        return Predictor(
            model,
            embeddings,
            device=self.device,
            signature=signature,
            allow_nonfinite=self.allow_nonfinite,
        )


@dataclass(frozen=True)
class Version:
    """A model with its rows."""

    name: str
    digest: str  # of the manifest it was loaded from
    predictor: Predictor


def load_version(
    settings: ModelSettings,
    source: Source,
    load_model: Callable[[Source], torch.nn.Module] = load_script,
) -> Version:
    """Beside whatever answers now, and tried on the sample. Raises what is wrong with it."""
    # Read before and after: a dump to the same directory replaces the manifest last.
    digest = digest_of(source.location)
    model = load_model(source)
    predictor = settings.predictor(model, embeddings_of(settings, source), source.signature)
    try_sample(settings, predictor)
    if digest_of(source.location) != digest:  # else rows and model could be of different dumps
        raise UnavailableError(f"{source.location} was replaced while it was read: load it again")
    step, dump_ids = source.manifest.step, source.manifest.dump_ids
    # Checkpoints of `dump_embedding` in an evaluation have no step; their dumps have names that sort by time.
    name = str(step) if step is not None else max(dump_ids, default="unknown")
    return Version(name, digest, predictor)


def embeddings_of(settings: ModelSettings, source: Source | None) -> EmbeddingSource:
    """The remote ones, or rows of the checkpoint in this process; `source` None: none yet."""
    if settings.embeddings is not None:
        return settings.embeddings
    assert settings.slots is not None, "ServedModel has checked it"
    if source is None or settings.follow is not None:
        return EmbeddedRows(source, settings.slots)  # which packets change
    return EmbeddedRows.shared(source, settings.slots)


def try_sample(settings: ModelSettings, predictor: Predictor) -> None:
    if settings.sample is not None:
        for message in split_batches(settings.sample) or [settings.sample]:  # an empty file is an error
            predictor.predict(PersiaBatch.from_bytes(message))


def digest_of(checkpoint: Location) -> str:
    return Manifest.read(checkpoint)[1]


@functools.cache
def _warn_of_positions(name: str) -> None:
    """Once a process, not for each version."""
    get_default_logger().warning(
        "%s: the checkpoint does not name the features of its model, so requests must have them in the order "
        "of training: train a batch with this version of persia, and dump it again",
        name,
    )


def _arranged(signature: Signature, batch: PersiaBatch) -> PersiaBatch:
    ids, dense = batch.id_type_features, batch.non_id_type_features
    id_order, dense_order = signature.order([f.name for f in ids], [f.name for f in dense])
    features = arranged(dense, dense_order)
    for expected, feature in zip(signature.dense, features, strict=True):
        expected.check(feature.data)
    if features is dense and isinstance(id_order, range):
        return batch
    return PersiaBatch(arranged(ids, id_order), features, batch_size=batch.batch_size, requires_grad=False)


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
