"""What TorchServe's clients send and get as JSON."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, List  # noqa: UP035 - TorchScript reads it

import numpy as np
import pytest
import torch
import yaml

from persia.checkpoint.checkpoints import Source
from persia.ctx import TrainCtx
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    NonIDTypeFeature,
    PersiaBatch,
    hash_strings,
)
from persia.embedding.optim import SGD
from persia.serving.archive import SLOTS_NAME
from persia.serving.tensors import json_values
from persia.serving.torchserve import Handler
from persia.storage.manifest import Manifest

SLOTS = {"slots_config": {"user": {"dim": 2}}}


class Model(torch.nn.Module):
    """user + 100 x age"""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        return embeddings[0].sum(1) + 100 * dense[0][:, 0] + self.bias


@pytest.fixture(scope="module")
def handler(tmp_path_factory: pytest.TempPathFactory) -> Handler:
    folder = tmp_path_factory.mktemp("served")
    model = Model()
    with TrainCtx(
        SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), model=model, mixed_precision=False, slots=SLOTS
    ) as ctx:
        ids = np.concatenate([np.array([7, 8], np.uint64), hash_strings(["anna"])])
        ctx.set_embedding("user", ids, np.array([[1, 1], [2, 2], [3, 3]], np.float32))
        ctx.forward(ctx.get_embedding_from_data(batch()))
        ctx.dump_checkpoint(str(folder / "model"), with_jit_model=True, step=5)
    (folder / SLOTS_NAME).write_text(yaml.safe_dump(SLOTS))
    settings = {
        "checkpoint": str(folder / "model"),
        "manifest": Manifest.read(Source(folder / "model").location)[1],
        "embedding_workers": [],
        "timeout_s": 10.0,
    }
    made = Handler()
    made.initialize(
        SimpleNamespace(
            system_properties={"model_dir": str(folder)},
            manifest={"model": {"modelName": "m", "modelVersion": "5"}},
            model_yaml_config={"persia": settings},
        )
    )
    return made


def batch() -> PersiaBatch:
    age = NonIDTypeFeature(np.array([[0.5], [1.0]], np.float32), "age")
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("user", np.array([7, 8], np.uint64))], [age], requires_grad=False
    )


def named(datatype: str = "INT64", data: Any = (7, 8), **more: Any) -> dict[str, Any]:
    """A request; the order of features is not that of training."""
    age = {"name": "age", "datatype": "FP32", "shape": [2, 1], "data": [0.5, 1.0]}
    user = {"name": "user", "datatype": datatype, "shape": [len(data)], "data": list(data)}
    return {"inputs": [age, user, *({"name": f"user.{key}", **value} for key, value in more.items())]}


def answers(handler: Handler, *requests: dict[str, Any]) -> list[Any]:
    statuses: dict[int, int] = {}
    context = SimpleNamespace(set_response_status=lambda code, phrase, idx: statuses.update({idx: code}))
    found = [json.loads(text) for text in handler.handle(requests, context)]
    return [
        (statuses[index], answer["error"]) if index in statuses else answer["outputs"][0]["data"]
        for index, answer in enumerate(found)
    ]


def test_named_tensors_are_answered_as_the_bytes_of_a_batch(handler: Handler) -> None:
    expected = [52.0, 104.0]
    text = json.dumps(named())
    found = answers(
        handler,
        {"body": batch().to_bytes()},
        {"body": named()},  # REST: TorchServe parses application/json
        {"body": text.encode()},
        {"batch": bytearray(b" \n" + text.encode())},  # gRPC
    )
    assert found == [expected] * 4


def test_lengths_weights_and_strings(handler: Handler) -> None:
    lengths = {"datatype": "INT32", "shape": [2], "data": [2, 1]}
    weights = {"datatype": "FP32", "shape": [3], "data": [1, 2, 0.5]}
    strings = named("BYTES", ["anna", "nobody"])
    several = named(data=(7, 8, 7), lengths=lengths, weights=weights)
    assert answers(handler, {"body": strings}, {"body": several}) == [[56.0, 100.0], [60.0, 101.0]]


def test_a_wrong_request_has_an_answer_of_its_own(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"inputs": named()["inputs"][:1]}
    lacking, damaged, good = answers(handler, {"body": missing}, {"body": b"{nonsense"}, {"body": named()})
    assert lacking == (400, lacking[1])
    assert "missing: user" in lacking[1]
    assert damaged[0] == 400
    assert good == [52.0, 104.0]

    class PredictionException(Exception):  # noqa: N818 - TorchServe's name
        pass

    module: Any = ModuleType("ts.utils.util")
    module.PredictionException = PredictionException
    for name in ("ts", "ts.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ts.utils.util", module)
    with pytest.raises(PredictionException, match="send one named 'batch'"):
        answers(handler, {"body": ["a list"]})


def test_nan_and_infinity_are_null_as_json_has_neither() -> None:
    output = np.array([[1.5, np.nan], [np.inf, -np.inf]], dtype=np.float32)
    assert json.loads(json.dumps(json_values(output), allow_nan=False)) == [1.5, None, None, None]
    assert json_values(np.array([[1], [2]])) == [1, 2]
