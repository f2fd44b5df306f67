"""How the dense model is kept equal on all NN workers: options for `TrainCtx(distributed_option=...)`."""

from __future__ import annotations

import abc
import pathlib
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from persia.errors import FailedPreconditionError, InvalidArgumentError

__all__ = [
    "BaguaDistributedOption",
    "DDPOption",
    "DistributedBaseOption",
    "get_default_distributed_option",
]

_DEFAULT_MASTER_PORT = 23456


class DistributedBaseOption(abc.ABC):
    """Where ranks meet: `master_port` on rank 0's host; `master_addr` None: discovered."""

    def __init__(self, master_port: int, master_addr: str | None = None) -> None:
        self.master_port = master_port
        self.master_addr = master_addr

    @abc.abstractmethod
    def convert2distributed_model(
        self,
        model: torch.nn.Module,
        world_size: int,
        rank_id: int,
        device_id: int | None = None,
        master_addr: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        """Joins the process group and returns the distributed model; waits for the other ranks."""

    @abc.abstractmethod
    def init_with_env_file(self) -> bool:
        """Whether ranks meet without an address of rank 0 being discovered."""


class DDPOption(DistributedBaseOption):
    """torch's DistributedDataParallel.

    Args:
        initialization_method: "tcp", or "file" with the option `sync_file`, a new file on a shared file
            system. Under torchrun, ranks meet where it says. `init_method` is accepted for it.
        backend: "nccl" (CUDA) or "gloo".
        options: master_port (23456), master_addr, sync_file.
    """

    def __init__(self, initialization_method: str = "tcp", backend: str = "nccl", **options: Any) -> None:
        method = options.pop("init_method", initialization_method)
        super().__init__(options.pop("master_port", _DEFAULT_MASTER_PORT), options.pop("master_addr", None))
        sync_file = options.pop("sync_file", None)
        if options:
            raise InvalidArgumentError(
                f"unknown options for DDPOption: {', '.join(sorted(options))}; "
                "known are master_port, master_addr, sync_file"
            )
        if backend not in ("nccl", "gloo"):
            raise InvalidArgumentError(f"backend is {backend!r}: choose 'nccl' (CUDA) or 'gloo'")
        if method not in ("tcp", "file"):
            raise InvalidArgumentError(f"initialization_method is {method!r}: choose 'tcp' or 'file'")
        if method == "file" and sync_file is None:
            raise InvalidArgumentError(
                "initialization_method 'file' needs the option sync_file, a path of a new file"
            )
        self.initialization_method = method
        self.backend = backend
        self.sync_file = None if sync_file is None else pathlib.Path(sync_file).absolute()

    def init_with_env_file(self) -> bool:
        return self.initialization_method == "file" or dist.is_torchelastic_launched()

    def convert2distributed_model(
        self,
        model: torch.nn.Module,
        world_size: int,
        rank_id: int,
        device_id: int | None = None,
        master_addr: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        if not dist.is_initialized():
            where = self._where(master_addr)
            dist.init_process_group(self.backend, init_method=where, rank=rank_id, world_size=world_size)
        device_ids = None if self.backend == "gloo" or device_id is None else [device_id]
        return DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=True), optimizer

    def _where(self, master_addr: str | None) -> str:
        if self.initialization_method == "file":
            assert self.sync_file is not None, "checked by the constructor"
            return f"file://{self.sync_file}"
        if dist.is_torchelastic_launched():
            return "env://"
        host = self.master_addr or master_addr
        if host is None:
            raise FailedPreconditionError("the address of rank 0 is unknown: pass DDPOption(master_addr=...)")
        return f"tcp://{f'[{host}]' if ':' in host else host}:{self.master_port}"


class BaguaDistributedOption:
    """Bagua is discontinued and not supported: creating this raises, naming the replacement."""

    def __init__(self, algorithm: str, **options: Any) -> None:
        raise FailedPreconditionError(
            f"BaguaDistributedOption(algorithm={algorithm!r}): Bagua is discontinued and is not supported; "
            "use persia.distributed.DDPOption(backend='nccl')"
        )


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """DDP over nccl for a CUDA device, over gloo on the CPU."""
    return DDPOption(backend="gloo" if device_id is None else "nccl")
