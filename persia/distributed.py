"""How the dense model is kept equal on all NN workers: options for `TrainCtx(distributed_option=...)`."""

from __future__ import annotations

import abc
import contextlib
import importlib
import importlib.util
import os
import pathlib
import socket
from collections.abc import Container
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from persia import env
from persia.errors import FailedPreconditionError, InvalidArgumentError

__all__ = [
    "BaguaDistributedOption",
    "DDPOption",
    "DistributedBaseOption",
    "get_default_distributed_option",
]

_DEFAULT_MASTER_PORT = 23456
_TCP_RTO_MAX_MS = 44  # since Linux 6.15; Python has no name for it


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
        # The published documentation calls it by the second name, its code by the first.
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
        others = _sockets()
        # A script may have joined the group itself, as for metrics over ranks.
        if not dist.is_initialized():
            where = self._where(master_addr)
            dist.init_process_group(
                self.backend,
                init_method=where,
                timeout=_collective_timeout(),
                rank=rank_id,
                world_size=world_size,
            )
        # find_unused_parameters: a batch may leave parameters without a gradient.
        device_ids = None if self.backend == "gloo" or device_id is None else [device_id]
        made = DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=True)
        _limit_retransmission_pauses(others)
        return made, optimizer

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


# The published names, and where bagua has them: (module of bagua.torch_api.algorithms, class).
_BAGUA_ALGORITHMS = {
    "gradient_allreduce": ("gradient_allreduce", "GradientAllReduceAlgorithm"),
    "decentralized": ("decentralized", "DecentralizedAlgorithm"),
    "low_precision_decentralized": ("decentralized", "LowPrecisionDecentralizedAlgorithm"),
    "qadam": ("q_adam", "QAdamAlgorithm"),
    "bytegrad": ("bytegrad", "ByteGradAlgorithm"),
    "async": ("async_model_average", "AsyncModelAverageAlgorithm"),
}
# Published options that bagua reads from the environment: (variable, default).
_BAGUA_VARIABLES: dict[str, tuple[str, int | float | bool]] = {
    "default_bucket_size": ("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 1024**2),
    "autotune_level": ("BAGUA_AUTOTUNE", 0),
    "bagua_service_port": ("BAGUA_SERVICE_PORT", 29501),
    "autotune_max_samples": ("BAGUA_AUTOTUNE_MAX_SAMPLES", 60),
    "autotune_warmup_time": ("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30),
    "is_output_autotune_log": ("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", False),
    "autotune_sampling_confidence_time": ("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0),
}


class BaguaDistributedOption(DistributedBaseOption):
    """Bagua's algorithms, where bagua is installed; CUDA only. Bagua itself is discontinued: prefer DDP.

    All ranks must get the same number of batches: Bagua knows nothing of ranks that end earlier.

    Args:
        algorithm: gradient_allreduce, decentralized, low_precision_decentralized, qadam (whose
            dense_optimizer must be bagua's QAdamOptimizer), bytegrad or async.
        options: master_port (23456), master_addr, default_bucket_size (bytes), autotune_level,
            bagua_service_port, autotune_max_samples, autotune_warmup_time (seconds),
            is_output_autotune_log, autotune_sampling_confidence_time (seconds).

    Raises InvalidArgumentError for an unknown algorithm or option, FailedPreconditionError without bagua.
    """

    def __init__(self, algorithm: str, **options: Any) -> None:
        super().__init__(options.pop("master_port", _DEFAULT_MASTER_PORT), options.pop("master_addr", None))
        if algorithm not in _BAGUA_ALGORITHMS:
            raise InvalidArgumentError(
                f"algorithm is {algorithm!r}: Bagua has {', '.join(_BAGUA_ALGORITHMS)}"
            )
        if options.pop("enable_bagua_net", False):
            raise InvalidArgumentError(
                "enable_bagua_net=True must be in place before Python starts: preload Bagua-Net with "
                "LD_PRELOAD, as its documentation says, and leave the option out"
            )
        unknown = sorted(set(options) - set(_BAGUA_VARIABLES))
        if unknown:
            raise InvalidArgumentError(
                f"unknown options for BaguaDistributedOption: {', '.join(unknown)}; known are master_port, "
                f"master_addr, {', '.join(_BAGUA_VARIABLES)}"
            )
        # Looked for without an import, for which the variables of `convert2distributed_model` must be set.
        if importlib.util.find_spec("bagua") is None:
            raise FailedPreconditionError(
                f"BaguaDistributedOption(algorithm={algorithm!r}): bagua is not installed. It is "
                "discontinued; use persia.distributed.DDPOption(backend='nccl'), or install the bagua wheel "
                "of your CUDA"
            )
        self.algorithm = algorithm
        self._options = options

    def init_with_env_file(self) -> bool:
        return False

    def convert2distributed_model(
        self,
        model: torch.nn.Module,
        world_size: int,
        rank_id: int,
        device_id: int | None = None,
        master_addr: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        if device_id is None:
            raise InvalidArgumentError("BaguaDistributedOption needs CUDA: pass device_id, or use DDPOption")
        for name, (variable, default) in _BAGUA_VARIABLES.items():
            value = self._options.get(name, os.environ.get(variable, default))
            # Set before bagua is imported, below: it reads them from the environment.
            os.environ[variable] = str(int(value) if isinstance(value, bool) else value)
        os.environ.setdefault("MASTER_ADDR", self.master_addr or master_addr or "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(self.master_port))
        bagua = importlib.import_module("bagua.torch_api")
        bagua.init_process_group()
        return model.with_bagua([optimizer], self._make_algorithm(optimizer)), optimizer  # type: ignore[operator]

    def _make_algorithm(self, optimizer: torch.optim.Optimizer | None) -> Any:
        module_name, class_name = _BAGUA_ALGORITHMS[self.algorithm]
        module = importlib.import_module(f"bagua.torch_api.algorithms.{module_name}")
        if self.algorithm != "qadam":
            return getattr(module, class_name)()
        if not isinstance(optimizer, module.QAdamOptimizer):
            raise InvalidArgumentError(
                f"algorithm 'qadam' with a dense_optimizer {type(optimizer).__name__}: it compresses the "
                "states of Adam, use bagua.torch_api.algorithms.q_adam.QAdamOptimizer"
            )
        return getattr(module, class_name)(optimizer)


def _collective_timeout() -> timedelta:
    """Twice the deadline of calls: a rank whose call fails must end before those that wait for it do."""
    return timedelta(seconds=2 * env.get_deadline_s())


def _sockets() -> dict[str, int]:
    """A descriptor of each socket of this process, by the name of the socket; empty if this is not Linux."""
    found = {}
    with contextlib.suppress(OSError):  # not Linux
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found[os.readlink(f"/proc/self/fd/{number}")] = int(number)
    return {name: number for name, number in found.items() if name.startswith("socket:")}


def _limit_retransmission_pauses(others: Container[str]) -> None:
    """Lets TCP retransmit every second while the network is cut. It would double the pause each time.

    Torch has no setting for its sockets: they are the sockets of this process that are not in `others`. NATS
    and RPC may connect again meanwhile. Their sockets use keepalive, which TCP_USER_TIMEOUT would delay.
    """
    give_up_ms = min(int(_collective_timeout().total_seconds() * 1000), 2**31 - 1)
    for name, number in _sockets().items():
        if name in others:
            continue
        with contextlib.suppress(OSError):  # no connection of TCP, closed meanwhile, or an older Linux
            is_blocking = os.get_blocking(number)
            connection = socket.socket(fileno=number)
            try:
                os.set_blocking(number, is_blocking)  # socket.setdefaulttimeout() would have changed it
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                    connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)
                    # TCP would give up after 15 retransmissions, now seconds after the first.
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, give_up_ms)
            finally:
                connection.detach()


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """DDP over nccl for the CUDA device `device_id`, over gloo for None, the CPU."""
    return DDPOption(backend="gloo" if device_id is None else "nccl")
