"""The peers of serving answer what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import List  # noqa: UP035 - torch.jit.script resolves typing.List

import grpc
import numpy as np
import pytest
import torch

from benchmarks.freshness import found, running
from benchmarks.grpc_load import INFER, closed_loop
from benchmarks.plain_model import PlainModel, encode


class Model(torch.nn.Module):
    def forward(
        self,
        dense: List[torch.Tensor],  # noqa: UP006
        ids: List[torch.Tensor],  # noqa: UP006
        lengths: List[torch.Tensor],  # noqa: UP006
        weights: List[torch.Tensor],  # noqa: UP006
    ) -> torch.Tensor:
        sums = torch.stack([one.sum() for one in ids]).sum()
        return dense[0][:, 1] + sums + lengths[1] + weights[0].sum()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "model.pt"
    torch.jit.script(Model()).save(str(path))  # type: ignore[no-untyped-call]
    return path


BODY = encode(
    [np.array([[1, 2], [3, 4]], np.float32)],
    [(np.array([10, 20], np.uint64), np.array([1, 1])), (np.array([5, 6, 7], np.uint64), np.array([1, 2]))],
)
ANSWER = [2.0 + 48 + 1 + 2, 4.0 + 48 + 2 + 2]


def test_a_body_has_all_features(model: Path) -> None:
    assert np.frombuffer(PlainModel(str(model)).answer(BODY), np.float32).tolist() == ANSWER


def test_a_bare_server_answers_any_client(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(log, "benchmarks.plain_model", str(model)) as process:
        address = found(log, r"is served at (\S+:\d+)", process)
        with grpc.insecure_channel(address) as channel:
            answer = channel.unary_unary(INFER)(BODY, timeout=60)
        assert np.frombuffer(answer, np.float32).tolist() == ANSWER
        outcome = closed_loop(address, [BODY], 2, 0.5, 60.0, "/any/Method")
    assert not outcome.failed_s
