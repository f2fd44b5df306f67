"""Options for several ranks: what they accept, and where ranks meet."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from persia.distributed import BaguaDistributedOption, DDPOption, get_default_distributed_option
from persia.errors import FailedPreconditionError, InvalidArgumentError


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"backend": "mpi"}, "backend is 'mpi'"),
        ({"initialization_method": "udp"}, "initialization_method is 'udp'"),
        ({"init_method": "udp"}, "initialization_method is 'udp'"),
        ({"initialization_method": "file"}, "needs the option sync_file"),
        ({"masterport": 1}, "unknown options for DDPOption: masterport"),
    ],
)
def test_ddp_option_refuses(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        DDPOption(**arguments)


def test_defaults_are_the_published_ones() -> None:
    option = DDPOption()
    assert (option.initialization_method, option.backend, option.master_port) == ("tcp", "nccl", 23456)
    assert (option.master_addr, option.init_with_env_file()) == (None, False)
    assert get_default_distributed_option().backend == "gloo"
    assert get_default_distributed_option(0).backend == "nccl"


def test_tcp_needs_the_address_of_rank_0() -> None:
    with pytest.raises(FailedPreconditionError, match="master_addr"):
        DDPOption(backend="gloo").convert2distributed_model(torch.nn.Linear(1, 1), 2, 0)


def test_ranks_meet_at_a_file(tmp_path: Path) -> None:
    option = DDPOption("file", "gloo", sync_file=tmp_path / "sync")
    assert option.init_with_env_file()
    try:
        model, optimizer = option.convert2distributed_model(torch.nn.Linear(1, 1), 1, 0)
        assert isinstance(model, DistributedDataParallel)
        assert optimizer is None
    finally:
        dist.destroy_process_group()


def test_bagua_is_refused_with_its_replacement_where_it_is_not_installed() -> None:
    with pytest.raises(FailedPreconditionError, match="bagua is not installed.*discontinued.*DDPOption"):
        BaguaDistributedOption("gradient_allreduce")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"algorithm": "ring"}, "algorithm is 'ring': Bagua has gradient_allreduce, decentralized"),
        ({"algorithm": "async", "bucket": 1}, "unknown options for BaguaDistributedOption: bucket"),
        ({"algorithm": "async", "enable_bagua_net": True}, "LD_PRELOAD"),
    ],
)
def test_bagua_option_refuses(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        BaguaDistributedOption(**arguments)


# No bagua wheel exists for the versions of Python and torch that persia needs: this stands in for what
# persia calls of it, and records the calls.
_BAGUA = {
    "__init__.py": "",
    "torch_api/__init__.py": """
import torch
calls = []
def init_process_group():
    calls.append("init")
def with_bagua(self, optimizers, algorithm):
    calls.append((type(algorithm).__name__, optimizers))
    return self
torch.nn.Module.with_bagua = with_bagua
""",
    "torch_api/algorithms/__init__.py": "",
    "torch_api/algorithms/gradient_allreduce.py": "class GradientAllReduceAlgorithm: pass",
    "torch_api/algorithms/decentralized.py": (
        "class DecentralizedAlgorithm: pass\nclass LowPrecisionDecentralizedAlgorithm: pass"
    ),
    "torch_api/algorithms/bytegrad.py": "class ByteGradAlgorithm: pass",
    "torch_api/algorithms/async_model_average.py": "class AsyncModelAverageAlgorithm: pass",
    "torch_api/algorithms/q_adam.py": """
import torch
class QAdamOptimizer(torch.optim.SGD): pass
class QAdamAlgorithm:
    def __init__(self, optimizer): self.optimizer = optimizer
""",
}


@pytest.fixture
def bagua(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, text in _BAGUA.items():
        path = tmp_path / "bagua" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    environment = dict(os.environ)
    monkeypatch.setattr(torch.nn.Module, "with_bagua", None, raising=False)
    yield importlib.import_module("bagua.torch_api")
    for name in [name for name in sys.modules if name.split(".")[0] == "bagua"]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("gradient_allreduce", "GradientAllReduceAlgorithm"),
        ("decentralized", "DecentralizedAlgorithm"),
        ("low_precision_decentralized", "LowPrecisionDecentralizedAlgorithm"),
        ("qadam", "QAdamAlgorithm"),
        ("bytegrad", "ByteGradAlgorithm"),
        ("async", "AsyncModelAverageAlgorithm"),
    ],
)
def test_bug_20_published_algorithms_are_those_of_bagua(bagua: Any, algorithm: str, expected: str) -> None:
    model = torch.nn.Linear(1, 1)
    q_adam = importlib.import_module("bagua.torch_api.algorithms.q_adam")
    optimizer = q_adam.QAdamOptimizer(model.parameters(), lr=0.1)
    option = BaguaDistributedOption(algorithm, autotune_level=2, is_output_autotune_log=True)
    assert option.convert2distributed_model(model, 2, 0, 0, "10.0.0.1", optimizer) == (model, optimizer)
    assert bagua.calls == ["init", (expected, [optimizer])]
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "23456")
    assert (os.environ["BAGUA_AUTOTUNE"], os.environ["BAGUA_IS_OUTPUT_AUTOTUNE_LOG"]) == ("2", "1")
    assert os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] == str(10 * 1024**2)


def test_bagua_needs_cuda_and_qadam_its_optimizer(bagua: Any) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(InvalidArgumentError, match="needs CUDA"):
        BaguaDistributedOption("async").convert2distributed_model(model, 2, 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidArgumentError, match="'qadam' with a dense_optimizer SGD"):
        BaguaDistributedOption("qadam").convert2distributed_model(model, 2, 0, 0, optimizer=sgd)
