"""Whatever a request says, the server answers it with a status of the protocol, and goes on serving."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, NonIDTypeFeature, PersiaBatch
from persia.serving.protocol import message

from .test_serving import Served, make_batch, one_model

GOOD = make_batch([10, 20, 99], dense=0.5)
FINE = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
Ask = Callable[[bytes], tuple[grpc.StatusCode, str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with one_model(tmp_path_factory.mktemp("wrong")) as served:
        yield served


@pytest.fixture
def ask(served: Served) -> Iterator[Ask]:
    """Status and message of a ModelInfer of these bytes. Afterwards the next request must be served."""
    with grpc.insecure_channel(served.address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def call(content: bytes) -> tuple[grpc.StatusCode, str]:
            try:
                infer(content, timeout=240)
            except grpc.RpcError as failure:
                return failure.code(), failure.details()
            return grpc.StatusCode.OK, ""

        yield call
    assert served.infer(GOOD) == ("7", [6.5, 14.5, 0.5]), served.log.read_text()


def request(batch: bytes) -> bytes:
    made = message("ModelInferRequest")(model_name="m")
    tensor = made.inputs.add(name="batch", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(batch)
    content: bytes = made.SerializeToString()
    return content


def ids(slot: str = "user", values: Any = (10, 20)) -> IDTypeFeatureWithSingleID:
    return IDTypeFeatureWithSingleID(slot, np.array(values, np.uint64))


def dense(shape: tuple[int, ...] = (2, 1), dtype: Any = np.float32) -> NonIDTypeFeature:
    return NonIDTypeFeature(np.zeros(shape, dtype))


WRONG = {
    "no dense": ([ids()], [], "dense features []"),
    "wide dense": ([ids()], [dense((2, 3))], "float32[2, 3]"),
    "integer dense": ([ids()], [dense(dtype=np.int64)], "int64[2, 1]"),
    "half dense": ([ids()], [dense(dtype=np.float16)], "float16[2, 1]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_features_that_the_model_cannot_take(ask: Ask, name: str) -> None:
    id_features, dense_features, expected = WRONG[name]
    batch = PersiaBatch(id_features, dense_features, requires_grad=False)
    code, details = ask(request(batch.to_bytes()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert expected in details


def test_samples_without_ids_are_zeros(served: Served) -> None:
    batch = PersiaBatch(
        [IDTypeFeature("user", [np.array([], np.uint64)] * 2)], [dense()], requires_grad=False
    )
    assert served.infer(batch.to_bytes()) == ("7", [0.0, 0.0])


def test_batches_cut_off_anywhere(ask: Ask) -> None:
    for length in range(0, len(GOOD), 3):
        code, details = ask(request(GOOD[:length]))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, (length, details)
        assert details


@pytest.mark.parametrize("outer", [False, True], ids=["batch", "request"])
def test_damaged_bytes(ask: Ask, outer: bool) -> None:
    content = request(GOOD) if outer else GOOD
    generator = np.random.default_rng(0)
    codes: collections.Counter[grpc.StatusCode] = collections.Counter()
    for _ in range(150):
        damaged = np.frombuffer(content, np.uint8).copy()
        places = generator.integers(0, len(damaged), generator.integers(1, 5))
        damaged[places] = generator.integers(0, 256, len(places))
        sent = damaged.tobytes()
        code, details = ask(sent if outer else request(sent))
        assert code in FINE | {grpc.StatusCode.NOT_FOUND}, (code, details, sent.hex())
        codes[code] += 1
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 20
