"""How the features of a batch become the arguments of a model: by name, in the order of the first batch."""

from __future__ import annotations

import itertools
import json

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from persia.pipeline.batch import PersiaTrainingBatch
from persia.storage.dense import named, takes_names
from persia.storage.signature import DenseInput, IdInput, Signature, arranged
from persia.validation import json_object, read_document, to_json

_Tensors = list[torch.Tensor]
Inputs = _Tensors | dict[str, torch.Tensor]  # what a model takes of either kind of features

# Ranks enter the training contexts of a script in one order, which makes the names of keys unique.
_contexts = itertools.count()


class TrainedInputs:
    """The signature of a training context: its first batch's, or that of the checkpoint that it loaded."""

    def __init__(self, world_size: int) -> None:
        self._key = f"persia/signature/{next(_contexts)}" if world_size > 1 else None

    def signature(
        self, known: Signature | None, batch: PersiaTrainingBatch, embeddings: _Tensors
    ) -> Signature:
        """That of the job with this batch in it. InvalidArgumentError: the batch's features disagree."""
        if known is None:
            # Loaders send to different ranks, so that ranks must agree on one order, too.
            known = self._agreed(_signature_of(batch, embeddings))
        _, order = known.order(*_names(batch))
        return known.widened(arranged([array for _, array in batch.dense.features], order))

    def _agreed(self, own: Signature) -> Signature:
        """The signature of the rank that had a batch first."""
        if self._key is None or not dist.is_initialized():
            return own
        told = _get_default_store().compare_set(self._key, "", json.dumps(to_json(own)))
        what = "the signature of another rank"
        return read_document(Signature, json_object(told, what), what)


def arranged_inputs(
    signature: Signature, batch: PersiaTrainingBatch, dense: _Tensors, embeddings: _Tensors
) -> tuple[_Tensors, _Tensors]:
    """The tensors in the signature's order. InvalidArgumentError: the batch has other features."""
    id_order, dense_order = signature.order(*_names(batch))
    return list(arranged(dense, dense_order)), list(arranged(embeddings, id_order))


def as_arguments(
    model: torch.nn.Module,
    signature: Signature | None,
    batch: PersiaTrainingBatch,
    inputs: tuple[_Tensors, _Tensors],
) -> tuple[Inputs, Inputs]:
    """Dense and embeddings as lists, or as dicts by name if `model.forward` is annotated with dicts."""
    if not takes_names(model):
        return inputs
    ids, others = input_names(signature, batch)
    return named(others, inputs[0]), named(ids, inputs[1])


def input_names(signature: Signature | None, batch: PersiaTrainingBatch) -> tuple[list[str], list[str]]:
    """Names of embeddings and of dense tensors, in the order of the tensors."""
    if signature is None or not is_of(signature, batch):
        return _names(batch)
    return [feature.name for feature in signature.ids], [feature.name for feature in signature.dense]


def is_of(signature: Signature, batch: PersiaTrainingBatch) -> bool:
    """Whether the batch has the features of the signature, in any order."""
    ids, others = _names(batch)
    expected = sorted(feature.name for feature in signature.ids)
    return sorted(ids) == expected and sorted(others) == sorted(feature.name for feature in signature.dense)


def _names(batch: PersiaTrainingBatch) -> tuple[list[str], list[str]]:
    return list(batch.names), [name for name, _ in batch.dense.features]


def _signature_of(batch: PersiaTrainingBatch, embeddings: _Tensors) -> Signature:
    ids = [
        # A raw slot's tensor is [batch, sample_fixed_size, dim + 1].
        IdInput(name=name, shape=tuple(tensor.shape[1:]), raw=tensor.ndim == 3)
        for name, tensor in zip(batch.names, embeddings, strict=True)
    ]
    dense = [
        DenseInput(name=name, dtype=array.dtype.name, shape=array.shape[1:])
        for name, array in batch.dense.features
    ]
    return Signature(ids=tuple(ids), dense=tuple(dense))
