"""Named tensors become a batch only where their names say which feature they are."""

from __future__ import annotations

import time

import numpy as np
import pytest

from persia.embedding.data import IDTypeFeature, PersiaBatch
from persia.errors import InvalidArgumentError, ResourceExhaustedError
from persia.serving.protocol import message_of
from persia.serving.tensors import Tensor, batch_of, decoded_batch, tensor_of_list
from persia.storage.signature import DenseInput, IdInput, Signature

USER = IdInput(name="user", shape=(2,), raw=False)
DENSE = DenseInput(name="anonymous", dtype="float32", shape=(1,))


def given(*names: str) -> list[Tensor]:
    user = tensor_of_list("user", "INT64", [1], [7])
    return [user, *(tensor_of_list(name, "FP32", [1, 1], [1.0]) for name in names)]


@pytest.mark.parametrize(
    "signature",
    [
        Signature(ids=(USER,), dense=(DENSE, DENSE)),
        Signature(ids=(USER, IdInput(name="anonymous", shape=(2,), raw=False)), dense=(DENSE,)),
    ],
)
def test_a_name_of_two_features_is_refused(signature: Signature) -> None:
    """One tensor would otherwise be given to the model twice."""
    with pytest.raises(InvalidArgumentError, match=r"named anonymous, .* send one input 'batch'"):
        batch_of(given("anonymous"), signature)


def test_ids_that_are_unpacked_have_a_bound() -> None:
    """A request of 3 MB whose IDs, all equal, would take 24 MB."""
    samples = [np.full(3_000_000, 7, np.uint64)]
    content = PersiaBatch([IDTypeFeature("user", samples)], requires_grad=False).to_bytes()
    assert len(content) < 4_000_000
    with pytest.raises(ResourceExhaustedError, match="send smaller batches"):
        decoded_batch(content)


def test_strings_may_be_nested() -> None:
    nested = tensor_of_list("user", "BYTES", [2, 1], [["a"], ["b"]])
    assert nested.values == ["a", "b"]
    with pytest.raises(InvalidArgumentError, match="they must agree"):
        tensor_of_list("user", "BYTES", [3], [["a"], ["b", "c"]])


def test_many_unknown_features_are_refused_at_once() -> None:
    names = [f"f{number}" for number in range(50_000)]
    signature = Signature(ids=(USER,), dense=(DENSE,))
    begin_s = time.thread_time()  # of the processor: the machine may be busy
    with pytest.raises(InvalidArgumentError, match=r"unknown: f0, .*missing: anonymous") as refused:
        signature.order(["user"], names)
    assert time.thread_time() - begin_s < 5  # comparing each with all takes 20 s
    assert len(message_of(refused.value)) < 2010
    assert message_of(ValueError("\N{SNOWMAN}" * 5000)).endswith("\N{SNOWMAN} ...")


def test_repeated_features_are_named() -> None:
    signature = Signature(ids=(USER,), dense=(DENSE, DenseInput(name="age", dtype="float32", shape=(1,))))
    with pytest.raises(InvalidArgumentError, match=r"unknown: x; missing: age; repeated: anonymous"):
        signature.order(["user"], ["anonymous", "x", "anonymous"])
    assert np.array_equal(signature.order(["user"], ["age", "anonymous"])[1], [1, 0])
