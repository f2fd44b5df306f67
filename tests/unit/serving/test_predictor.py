"""What a predictor does with a batch before its model."""

from __future__ import annotations

from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from persia.config import parse_embedding_config
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.errors import InvalidArgumentError
from persia.pipeline.dense_ids import DenseIdReader
from persia.serving.predictor import Predictor
from persia.serving.server import _use_inputs
from persia.storage.dense_slots import DenseSlots
from persia.storage.signature import IdInput, Signature

SLOTS = {"slots_config": {"user": {"dim": 2, "cardinality": 10, "placement": "dense"}}}


class FirstEmbedding(torch.nn.Module):
    def forward(self, _dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return embeddings[0]


def batch_of(*ids: int) -> PersiaBatch:
    feature = IDTypeFeatureWithSingleID("user", np.array(ids, np.uint64))
    return PersiaBatch([feature], requires_grad=False)


def test_ids_of_dense_slots_are_converted_once_a_batch() -> None:
    model = FirstEmbedding()
    DenseSlots.attach(model, parse_embedding_config(SLOTS), None)
    predictor = Predictor(model, Mock())
    with patch.object(DenseIdReader, "convert", autospec=True, side_effect=DenseIdReader.convert) as convert:
        (rows,) = predictor.predict(batch_of(3, 9))
        assert convert.call_count == 1
    assert rows.shape == (2, 2)
    with pytest.raises(InvalidArgumentError, match="slot 'user' has the ID 10"):
        predictor.checked(batch_of(3, 10))


def test_the_front_knows_the_limits_of_dense_slots() -> None:
    model = FirstEmbedding()
    DenseSlots.attach(model, parse_embedding_config(SLOTS), None)
    names = ("item", "user")
    signature = Signature(ids=tuple(IdInput(name=name, shape=(2,), raw=False) for name in names))
    predictor = Predictor(model, Mock(), signature=signature)
    inference, front = Mock(canary=None, request_log=None), Mock()
    inference.model.signature, inference.model.current.predictor = signature, predictor
    _use_inputs(front, inference)
    assert front.set_inputs.call_args.args[1] == [("item", 0), ("user", 10)]
