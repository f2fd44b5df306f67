"""Options for several ranks: what they accept, and where ranks meet."""

from __future__ import annotations

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


def test_bagua_is_refused_with_its_replacement() -> None:
    with pytest.raises(FailedPreconditionError, match="Bagua is discontinued.*DDPOption"):
        BaguaDistributedOption("gradient_allreduce")
