"""Types of the compiled module. Only `persia._native` imports it; tests compare this stub with the module.

All arrays cross without copies: inputs must be C-contiguous and of the stated dtype (a TypeError names
the argument otherwise), outputs are views that keep their native buffer alive. The GIL is released
around every call that may block or compute. Failures raise `persia.errors.PersiaError` subclasses by status
code.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

__version__: str
simd_level: str  # "scalar", "avx2", "avx512" or "neon": what run-time dispatch chose

class SlotConfig:
    """One slot of the embedding config, as the engine wants it."""

    def __init__(
        self,
        *,
        name: str,
        dim: int,
        embedding_summation: bool = True,
        sqrt_scaling: bool = False,
        sample_fixed_size: int = 10,
        hash_stack_rounds: int = 0,
        hash_stack_size: int = 0,
        index_prefix: int = 0,
        group: int = 0,
    ) -> None: ...
    name: str
    dim: int

class TrainConfig:
    """Initial values, optimizer, admission, weight bound. The constructor raises InvalidArgumentError."""

    def __init__(
        self,
        *,
        optimizer: str,  # "sgd", "adagrad", "rowwise_adagrad", "adam"
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        initial_accumulator_value: float = 0.0,
        g_square_momentum: float = 1.0,
        eps: float = 1e-10,
        beta1: float = 0.9,
        beta2: float = 0.999,
        lower: float = -0.01,
        upper: float = 0.01,
        seed: int = 0,
        admit_probability: float = 1.0,
        weight_bound: float = 10.0,
    ) -> None: ...

class BatchReference:
    def __init__(self, worker_index: int, worker_incarnation: int, reference: int) -> None: ...
    @property
    def worker_index(self) -> int: ...
    @property
    def worker_incarnation(self) -> int: ...
    @property
    def reference(self) -> int: ...  # 0: the worker expects no gradient

class SlotEmbedding:
    @property
    def name(self) -> str: ...
    @property
    def raw(self) -> bool: ...
    @property
    def sample_fixed_size(self) -> int: ...  # raw slots, else 0
    @property
    def rows(self) -> NDArray[np.float32]: ...  # [num_rows, dim]; pooled: one a sample; raw: row 0 is zeros
    @property
    def index(self) -> NDArray[np.int64] | None: ...  # raw: [batch, sample_fixed_size], 0 is padding
    @property
    def sample_num_ids(self) -> NDArray[np.uint32] | None: ...  # raw: [batch]

class LookupResult:
    @property
    def reference(self) -> BatchReference: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def slots(self) -> list[SlotEmbedding]: ...  # in the order of the batch's features

class ReturnReport:
    @property
    def staleness(self) -> int: ...  # updates a server applied between lookup and this one; the largest
    @property
    def num_updated(self) -> int: ...  # rows
    @property
    def num_missing(self) -> int: ...
    @property
    def num_nonfinite_slots(self) -> int: ...
    @property
    def num_skipped_slots(self) -> int: ...

def encode_id_features(
    batch_size: int, features: Sequence[tuple[str, NDArray[np.uint64], NDArray[np.uint32]]]
) -> bytes:
    """Encodes (name, ids[total], offsets[batch_size + 1]) triples; the wire format's "ID features"."""

def check_id_features(message: Buffer) -> int:
    """The batch size of an "ID features" message; raises CorruptionError, InvalidArgumentError."""

def decode_id_features(message: Buffer) -> list[tuple[str, NDArray[np.uint64], NDArray[np.uint32]]]:
    """The features of an "ID features" message as (name, ids, offsets) copies."""

def flatten_samples(
    name: str, samples: Sequence[NDArray[np.uint64]]
) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Joins 1-D uint64 arrays, one per sample, into (ids, offsets). Errors name feature and sample."""

class ParameterServer:
    def __init__(
        self,
        *,
        replica_index: int,
        replica_size: int,
        capacity: int,
        num_internal_shards: int,
        num_handler_threads: int = 2,
    ) -> None: ...
    def start(self, host: str, port: int) -> int: ...  # returns the port; may be called once
    def stop(self, timeout_s: float = 10.0) -> None: ...
    @property
    def incarnation(self) -> int: ...
    def stats(self) -> dict[str, int]: ...

class EmbeddingWorker:
    """The embedding worker role: engine, connections to the parameter servers, RPC service."""

    def __init__(
        self,
        *,
        slots: Sequence[SlotConfig],
        feature_index_prefix_bit: int,
        num_servers: int,
        replica_index: int = 0,
        forward_buffer_size: int = 1000,
        buffered_data_expired_s: int = 1000,
        num_handler_threads: int = 4,
    ) -> None: ...
    def set_server(self, index: int, address: str) -> None: ...
    def start(self, host: str, port: int) -> int: ...
    def stop(self, timeout_s: float = 10.0) -> None: ...
    def register_batch(
        self, loader_index: int, id_features: Buffer
    ) -> int: ...  # ResourceExhaustedError: full
    @property
    def incarnation(self) -> int: ...
    def stats(self) -> dict[str, int]: ...

class EmbeddingClient:
    """Calls of an NN worker. Thread-safe; every call ends by `timeout_s`."""

    def configure(self, config: TrainConfig, *, replace: bool = False, timeout_s: float = 60.0) -> None: ...
    def lookup(
        self, reference: BatchReference, *, requires_grad: bool, timeout_s: float = 60.0
    ) -> LookupResult: ...
    def lookup_direct(
        self, worker_index: int, id_features: Buffer, *, requires_grad: bool, timeout_s: float = 60.0
    ) -> LookupResult: ...
    def return_gradients(
        self,
        reference: BatchReference,
        gradients: Sequence[tuple[str, NDArray[np.float32] | None]],  # [num_rows, dim]; None: skipped
        *,
        scale: float = 1.0,
        timeout_s: float = 60.0,
    ) -> ReturnReport: ...
    def release(self, reference: BatchReference, *, timeout_s: float = 60.0) -> None: ...
    def set_embeddings(
        self, signs: NDArray[np.uint64], rows: NDArray[np.float32], *, timeout_s: float = 60.0
    ) -> None: ...
    def clear(self, *, timeout_s: float = 60.0) -> None: ...
    def sizes(self, *, timeout_s: float = 60.0) -> list[int]: ...  # rows per parameter server

class RemoteClient(EmbeddingClient):
    def __init__(self, num_workers: int) -> None: ...
    def set_worker(self, index: int, address: str) -> None: ...

class EmbeddedClient(EmbeddingClient):
    """Embedding worker and store in this process."""

    def __init__(
        self,
        *,
        slots: Sequence[SlotConfig],
        feature_index_prefix_bit: int,
        capacity: int = 1_000_000_000,
        num_internal_shards: int = 16,
        forward_buffer_size: int = 1000,
    ) -> None: ...
    def register_batch(self, loader_index: int, id_features: Buffer) -> BatchReference: ...
