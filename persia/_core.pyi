"""Types of the compiled module. Only `persia._native` imports it; tests compare this stub with the module.

All arrays cross without copies: inputs must be C-contiguous and of the stated dtype (a TypeError names
the argument otherwise), outputs are views that keep their native buffer alive. The GIL is released
around every call that may block or compute. Failures raise `persia.errors.PersiaError` subclasses by status
code.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

__version__: str
simd_level: str  # "scalar", "avx2", "avx512" or "neon": what run-time dispatch chose

DURATION_BOUNDS_S: tuple[float, ...]  # upper bounds of the buckets of durations; the last one has none

class DurationStats:
    """How long one phase of the work takes: counted, and part of traces."""

    def __init__(self, name: str) -> None: ...
    def record(
        self, begin_ns: int, end_ns: int, reference: int = 0, batch_id: int = 18446744073709551615
    ) -> None: ...  # of time.monotonic_ns()
    def snapshot(self) -> tuple[list[int], float, float]: ...  # count of each bucket, sum [s], last [s]
    @property
    def name(self) -> str: ...

class TracedBatch:
    """`with TracedBatch(batch_id): ...`: calls of this thread are about that batch. Spans in all processes
    tell, of batch_id the lower 32 bits."""

    def __init__(self, batch_id: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exc_info: object) -> None: ...

def enable_durations(enabled: bool) -> None:
    """Whether this process measures durations, and what else costs time to count; it does by default."""

def start_trace(capacity: int) -> None:
    """Records every duration measured from now on as a span, `capacity` of them at most."""

def stop_trace(one_in: int = 0) -> tuple[list[tuple[str, int, int, int, int | None, int]], int]:
    """Ends it: (name, begin [ns], end [ns], reference or 0, batch_id, thread) of each span, and how many did
    not fit. `one_in`: only spans of the batches whose number is a multiple of it; 0: all."""

def keep_freed_memory() -> None:
    """From now on rows that are freed leave their memory to later rows of this process, not to the system."""

def kept_memory_bytes() -> int:
    """What `keep_freed_memory` keeps now."""

class RequestCounts:
    """What became of requests for predictions. Thread-safe."""

    def __init__(self, name: str) -> None: ...
    def add(self, begin_ns: int, code: int) -> None: ...  # of time.monotonic_ns(), and gRPC's status
    # Requests by code, ns of those with code 0, ns of the others, ms since 1970 of the last one.
    def snapshot(self) -> tuple[list[int], int, int, int]: ...
    def durations(self) -> tuple[list[int], float, float]: ...  # as of DurationStats

class QueuedRequest:
    def give_up(self) -> None:
        """It need not be computed any more."""

class QueuedBatch:
    """Requests that are computed together. One of answer, fail and split ends it."""

    @property
    def num_requests(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    def message(self) -> bytes:
        """All samples as one PersiaBatch."""

    def receivers(self) -> list[tuple[Any, int, int]]:
        """(on_failed, first sample, samples) of each request of Python, which the caller answers."""

    def answer(
        self,
        model_name: str,
        version: str,
        marks: Sequence[str],
        outputs: Sequence[tuple[str, NDArray[Any]]],
    ) -> None: ...
    def fail(self, code: int, message: str) -> None: ...
    def split(self) -> list[QueuedBatch]:
        """A batch of each request."""

class RequestQueue:
    """Requests that wait to be computed. Thread-safe."""

    def __init__(
        self, max_batch_size: int, max_delay_s: float, max_queued: int, num_threads: int
    ) -> None: ...
    def submit(
        self, content: Buffer, timeout_s: float, on_failed: Callable[[int, str], None]
    ) -> QueuedRequest:
        """`content`: of PersiaBatch.to_bytes. `on_failed` is called, from any thread, with gRPC's code and a
        message if the request is not computed in time or its batch fails."""

    def next(self) -> QueuedBatch | None:
        """Waits for one; None: it is closed and empty."""

    def close(self) -> None: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...

class Draw:
    """Whether a request is of a share. Thread-safe."""

    share: float  # from 0 to 1
    def __init__(self, purpose: str, share: float) -> None: ...
    def takes(self, id: bytes) -> bool:
        """`id` empty: by chance. Servers agree about equal IDs; purposes are independent of each other."""

class AnsweredRequests:
    """Requests of a share, on their way to a thread that logs them. Thread-safe."""

    def __init__(self, draw: Draw) -> None: ...
    def offer(self, to_bytes: Callable[[], bytes]) -> None:
        """`to_bytes`: of a PersiaBatch. Never waits. Not called for one that is dropped."""

    def next(self) -> bytes | None:
        """Waits for the bytes of one; None: it is closed and empty."""

    def close(self) -> None: ...
    @property
    def num_dropped(self) -> int: ...

class FrontModel:
    """A model behind the gRPC port."""

    def __init__(
        self,
        name: str,
        queue: RequestQueue,
        counts: RequestCounts,
        canary: Draw | None = None,
        shadow: Draw | None = None,
        log: AnsweredRequests | None = None,
    ) -> None:
        """`canary`, `shadow`: of plain requests that Python answers, the first one of those that ask for no
        version."""

class ServingFront:
    """The gRPC port for predictions: plain requests join their model's queue, other calls become events."""

    def __init__(
        self,
        models: Sequence[FrontModel],
        counts: RequestCounts,
        timeout_s: float,
        max_message_bytes: int,
        max_calls: int,
        token_digest: bytes | None = None,
        tls: tuple[str, str, str] | None = None,
    ) -> None:
        """`counts`: of requests that name none of the models. `tls`: certificate, key and CA of clients, or
        ""."""

    def start(self, host: str, port: int) -> int: ...
    def stop(self, timeout_s: float) -> None:
        """Begins no more calls; those under way are answered, or cut off after `timeout_s`."""

    def set_inputs(
        self,
        model_name: str,
        ids: Sequence[tuple[str, int]] | None,
        dense: Sequence[tuple[str, int, Sequence[int]]],
        by_name: bool,
        allow_nonfinite: bool,
    ) -> None:
        """What plain requests have. `ids`: each name, and the exclusive upper bound of its IDs, 0: none; all
        None: the model has no signature. `dense`: name, number of the dtype in PersiaBatch.to_bytes, shape of
        a sample. `by_name`: tensors may be named like features."""

    def check_tensors(self, message: bytes) -> None:
        """InvalidArgumentError: this ModelInferRequest, which was compressed, has too many tensors."""

    def fileno(self) -> int: ...  # readable while there are events
    def take_events(self) -> list[tuple[int, str, Any]]:
        """(number of the call, kind, what it says) each: "call" (method, authorization, encoding, peer,
        arrived [ns], deadline [ns] or None, in place of a missing ID for draws, or ""); "message" (bytes, is
        compressed); "end" None; "closed" None."""

    def send(self, call: int, message: bytes) -> None: ...
    def finish(self, call: int, code: int, text: str) -> None: ...

def set_identity(role: str, key: bytes, accepted: Mapping[str, bytes]) -> None:
    """Says who this process is on RPC connections. `key` is that of its role, `accepted` has the keys of the
    roles that its servers accept. Servers and channels that exist already keep theirs."""

def set_tls(certificate: str, key: str, ca: str) -> None:
    """TLS 1.3 with certificates of both ends on RPC connections of servers and channels made later. Paths
    of PEM files; new connections read them again when they have changed."""

def clear_security() -> None:
    """Forgets identity and TLS: servers and channels made later are open. For tests that share a process."""

def take_audit_events() -> list[dict[str, Any]]:
    """Removes and returns what was recorded, the oldest first: time (Unix), peer, role, method, outcome."""

class SlotConfig:
    """One slot of the embedding config, as the engine wants it."""

    def __init__(
        self,
        *,
        name: str,
        dim: int,
        embedding_summation: bool = True,
        sqrt_scaling: bool = False,
        mean_scaling: bool = False,
        sample_fixed_size: int = 10,
        hash_stack_rounds: int = 0,
        hash_stack_size: int = 0,
        mode: int = 0,  # the number of its consistency mode; below 32
        index_prefix: int = 0,
        group: int = 0,
        num_array_ids: int = 0,  # above 0: EmbeddingBags keeps the rows by ID, and all IDs are below it
        rows: dict[str, object] | None = None,  # optimizer, admission, ... of its own
    ) -> None: ...
    name: str
    dim: int

class TrainConfig:
    """Initial values, optimizer, admission, weight bound. The constructor raises InvalidArgumentError."""

    def __init__(
        self,
        *,
        optimizer: str,  # "sgd", "adagrad", "rowwise_adagrad", "adam", ...: docs/configuration.md
        lower: float = -0.01,
        upper: float = 0.01,
        initializer: dict[str, object] | None = None,  # takes the place of lower and upper
        seed: int = 0,
        admit_probability: float = 1.0,
        admit_after: int = 1,
        weight_bound: float = 10.0,
        time_to_live_sec: float = 0.0,
        min_norm: float = 0.0,
        lr_factor: float = 1.0,
        **hyper_parameters: float,  # of the optimizer: lr, momentum, ...
    ) -> None: ...
    def encode(self) -> bytes: ...  # the wire form; what a checkpoint keeps
    @staticmethod
    def decode(encoded: Buffer) -> TrainConfig: ...  # CorruptionError: not one, or of a newer version

CHECKPOINT_TRAILER_BYTES: int

def parse_checkpoint_header(head: Buffer) -> dict[str, int | TrainConfig | None]:
    """Of a checkpoint file whose first bytes (256 are enough) are given.

    Keys: "step", "num_rows" (of the whole store), "part", "num_parts", "replica_index", "replica_size",
    "train_config" (None: the store was never configured), "is_delta" (0 or 1),
    "is_from_nothing" (0 or 1: a delta after all rows were cleared), "header_bytes".
    """

def parse_checkpoint_trailer(trailer: Buffer) -> tuple[int, int]:
    """(offset, length) of the footer, from the last CHECKPOINT_TRAILER_BYTES; raises CorruptionError."""

def parse_checkpoint_footer(footer: Buffer) -> NDArray[np.void]:
    """The blocks of a file in its order, their own lengths, rows and checksums; raises CorruptionError.

    A structured array [num_blocks] of virtual_shard u4, num_rows u4, offset u8, length u8, checksum u8.
    """

class BlockRows:
    """The rows of one block of a checkpoint: one virtual shard, one dim."""

    virtual_shard: Final[int]
    is_removal: Final[bool]  # signs of rows that are gone; all other arrays are empty
    dim: Final[int]
    signs: Final[NDArray[np.uint64]]  # [num_rows]
    ages: Final[NDArray[np.uint32]]  # [num_rows], batches since the row was last used
    embeddings: Final[NDArray[np.float32]]  # [num_rows, dim]
    state: Final[NDArray[np.float32]]  # [num_rows, state floats of the optimizer]
    scalars: Final[NDArray[np.uint32]]  # [num_rows] or none: Adam's steps, row-wise Adagrad's bits

def decode_checkpoint_blocks(chunk: Buffer) -> list[BlockRows]:
    """The rows of whole blocks, one behind the other; raises CorruptionError."""

class SnapshotPart:
    """One file of a snapshot. Not for several threads at once."""

    def read(self, max_bytes: int) -> bytes: ...  # the next 1 to max_bytes bytes; b"" at the end
    @property
    def num_rows(self) -> int: ...  # in what was encoded so far; at the end, of the file
    @property
    def num_bytes(self) -> int: ...  # returned by read() so far

class Snapshot:
    """The rows of a store as they were at one moment, read while training goes on.

    The parts together hold every row once; different threads may read different parts. When training changes
    rows faster than they are read, updates are held up for at most `patience_s`, then read() raises
    ResourceExhaustedError and training goes on alone. close(), or dropping the object and its parts, ends it.
    """

    @property
    def step(self) -> int: ...  # updates that the store had applied
    @property
    def num_rows(self) -> int: ...
    @property
    def num_parts(self) -> int: ...
    @property
    def train_config(self) -> TrainConfig | None: ...
    def part(self, index: int) -> SnapshotPart: ...  # the same object each time
    @property
    def is_from_nothing(self) -> bool: ...  # of changes: all rows were cleared since the ones before
    def commit(self) -> None: ...  # of changes: they are stored; without it they come again with the next
    def close(self) -> None: ...

class CheckpointLoader:
    """Brings the blocks of checkpoint files into a store. Chunks are whole blocks, one behind the other.

    Blocks may come in any order and from several threads; those of other servers are skipped and counted.
    """

    def verify(self, chunk: Buffer) -> int: ...  # checks everything, changes nothing; the number of rows
    def replace(self) -> None: ...  # removes all rows and takes over the train config
    def add(self, chunk: Buffer) -> int: ...  # the number of rows that were added; checks like verify()
    def prepare(self, chunk: Buffer) -> int: ...  # of begin_apply(): checks and keeps rows and removals
    def apply(self) -> int: ...  # all that is prepared, seen all at once
    def commit(self) -> None: ...  # the order of eviction over all that was added; trims to the capacity
    @property
    def num_rows(self) -> int: ...  # added
    @property
    def num_foreign(self) -> int: ...  # rows of other servers
    @property
    def num_evicted(self) -> int: ...  # for which the store had no room, the oldest

HAS_PMEM: bool  # whether pools of kind "pmem" can be opened: libpmem was there when this was built

def create_pool(directory: str, size_bytes: int, kind: str, schema: str, extent_bytes: int) -> None: ...
def inspect_pool(directory: str) -> dict[str, Any]: ...  # works while a server has the pool
def check_pool(directory: str) -> dict[str, Any]: ...  # UnavailableError: a server has it
def commit_pool(
    directory: str, *, batch: int, num_rows: int, pool_id: int, sequence: int
) -> None: ...  # what prepared_checkpoint() returned; FailedPreconditionError: changed or opened since
def grow_pool(directory: str, size_bytes: int) -> None: ...

class OpenPool:
    """A pool's rows as of its committed batch. UnavailableError: a server has it."""

    def __init__(self, directory: str, kind: str) -> None: ...  # kind: "file" or "pmem"
    @property
    def committed(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    def signs(self) -> NDArray[np.uint64]: ...  # [num_rows], ascending
    def row(
        self, sign: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], int, int]: ...  # embedding, state, scalar, batch
    def close(self) -> None: ...

class BatchReference:
    def __init__(self, worker_index: int, worker_incarnation: int, reference: int) -> None: ...
    worker_index: Final[int]
    worker_incarnation: Final[int]
    reference: Final[int]  # 0: the worker expects no gradient

# [num_rows, dim]; of an unpooled slot (sums by distinct row, greatest magnitude before); None: skipped
_SlotGradient: TypeAlias = NDArray[np.float32] | tuple[NDArray[np.float32], float] | None

class SlotEmbedding:
    name: Final[str]
    raw: Final[bool]
    absent: Final[bool]  # not asked for: no rows
    sample_fixed_size: Final[int]  # raw slots, else 0
    dim: Final[int]
    num_rows: Final[int]
    rows: Final[NDArray[np.float32]]  # [num_rows, dim]; pooled: one a sample; raw: row 0 is zeros
    index: Final[NDArray[np.int64] | None]  # raw: [batch, sample_fixed_size], 0 is padding
    sample_num_ids: Final[NDArray[np.uint32] | None]  # raw: [batch]

class LookupResult:
    reference: Final[BatchReference]
    batch_size: Final[int]
    slots: Final[list[SlotEmbedding]]  # in the order of the batch's features
    def lay_out_pack(self) -> PackLayout: ...
    def fill_pack(self, layout: PackLayout, buffer: NDArray[np.uint8]) -> None:
        """Fills the first `layout.size_bytes` bytes of a writable buffer."""

class PackedBlock:
    """Unpooled slots of one dim. Places of arrays are bytes from the pack's begin."""

    dim: Final[int]
    slots: Final[list[int]]  # into LookupResult.slots
    first_rows: Final[list[int]]  # by slot, and the end: its rows within the block's
    num_numbers: Final[int]
    rows: Final[int]  # float32 [first_rows[-1], dim]
    numbers: Final[int]  # int32 [num_numbers]: the rows that the bags are the sums of
    offsets: Final[int | None]  # int32 [slots x batch_size + 1], of the bags; None: each has one number
    factors: Final[int | None]  # float32 [slots x batch_size], of the bags' sums; None: all 1

class PackedSlot:
    """A pooled or raw slot."""

    position: Final[int]  # into LookupResult.slots
    rows: Final[int]  # float32 [num_rows, dim]
    index: Final[int | None]  # raw: int32 [batch_size, sample_fixed_size]

class PackLayout:
    batch_size: Final[int]
    blocks: Final[list[PackedBlock]]
    slots: Final[list[PackedSlot]]
    size_bytes: Final[int]

class ReturnReport:
    staleness: Final[int]  # updates a server applied between lookup and this one; the largest
    lookups: Final[list[tuple[int, int]]]  # (slots, the same of their rows), the earliest first
    num_updated: Final[int]  # rows
    num_missing: Final[int]
    num_nonfinite_slots: Final[int]
    num_skipped_slots: Final[int]

# (name, ids [total], offsets [batch_size + 1], weights [total] or None)
_IdFeature: TypeAlias = tuple[str, NDArray[np.uint64], NDArray[np.uint32], NDArray[np.float32] | None]

def encode_id_features(
    batch_size: int,
    features: Sequence[_IdFeature | tuple[str, NDArray[np.uint64], NDArray[np.uint32]]],  # no weights
) -> bytes:
    """Encodes features; the wire format's "ID features"."""

def decode_id_features(message: Buffer, max_id_bytes: int = 1073741824) -> list[_IdFeature]:
    """The features of an "ID features" message, copied.

    Raises CorruptionError, InvalidArgumentError, or ResourceExhaustedError where the message packs more than
    `max_id_bytes` of IDs, 8 bytes each.
    """

def flatten_samples(
    name: str, samples: Sequence[NDArray[np.uint64] | NDArray[np.int64]]
) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Joins 1-D uint64 or int64 arrays, one a sample, into (ids, offsets). Errors name feature and sample."""

def flatten_weights(
    name: str, samples: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """The same of weights."""

def flatten_strings(
    name: str, samples: Sequence[str | bytes | Sequence[str | bytes] | None]
) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """The same of strings, which become IDs: XXH64 of their UTF-8 bytes. None is a sample without any."""

def parse_clicks(
    text: Buffer, num_numbers: int, num_categories: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint64], int, int, list[tuple[int, str]]]:
    """Lines of a label, integers and categories, separated by tabs.

    Labels `[n]`, numbers `[num_numbers, n]` and IDs `[num_categories, n]` of good lines, the number of all
    lines and of bad ones, and (line from 1, reason) of the first 100 of those. An empty number is 0. An ID is
    the category's hash, or 0 if it is empty.
    """

def hash_string_buffer(offsets: NDArray[np.int64], data: Buffer) -> NDArray[np.uint64]:
    """The IDs of the strings data[offsets[i]:offsets[i + 1]]."""

class TierOptions:
    """Of a store whose rows are in a pool, but for a cache in memory."""

    def __init__(
        self,
        *,
        directory: str,
        kind: str,
        size_bytes: int,
        cache_rows: int = 0,  # or cache_bytes
        cache_bytes: int = 0,
        syncs: bool = True,
        num_threads: int = 1,
    ) -> None: ...

class EmbeddingStore:
    """The rows of a parameter server, an embedded client or embedding bags; keeps its owner alive."""

    def remove_small_rows(self) -> int: ...  # those below their min_norm; how many they were
    def begin_snapshot(
        self,
        num_parts: int = 1,
        *,
        max_waiting_bytes: int = 268435456,
        patience_s: float = 10.0,
        with_state: bool = True,
        max_processors: float = 0.0,  # while the store is trained, of those who read; 0: any
    ) -> Snapshot: ...  # FailedPreconditionError: another one, or a load, is under way
    def begin_load(
        self, train_config: TrainConfig, *, with_state: bool = True, fresh_state: bool = False
    ) -> CheckpointLoader: ...  # without state: for a server that only answers lookups for inference
    def track_changes(self, max_rows: int) -> None: ...  # remembers which rows change; 0: no longer
    def change_status(self) -> dict[str, int | bool]: ...  # max_rows, num_rows, is_due, has_overflowed
    def take_changes(
        self, num_parts: int = 1, *, max_waiting_bytes: int = 268435456, patience_s: float = 10.0
    ) -> Snapshot: ...  # ResourceExhaustedError: too many, take a full snapshot
    def begin_apply(
        self, train_config: TrainConfig, *, is_from_nothing: bool = False, with_state: bool = True
    ) -> CheckpointLoader: ...  # of another store's changes
    def num_updates(
        self, signs: NDArray[np.uint64]
    ) -> NDArray[np.uint32]: ...  # of their rows; FailedPreconditionError without counts_updates
    def stats(self) -> StoreStats: ...
    def tier_stats(self) -> dict[str, int] | None: ...  # None: rows are in memory alone
    def request_checkpoint(self) -> int: ...  # held: it waits for one of the two calls below
    def prepared_checkpoint(
        self, number: int
    ) -> dict[str, int] | None: ...  # None: rows are still being written; for commit_pool()
    def commit_checkpoint(self, number: int) -> None: ...
    def drop_checkpoint(self, number: int) -> None: ...

class ParameterServer:
    def __init__(
        self,
        *,
        replica_index: int,
        replica_size: int,
        capacity: int,
        num_internal_shards: int,
        num_handler_threads: int = 2,
        read_only: bool = False,  # answers lookups only, and only after mark_loaded()
        tier: TierOptions | None = None,
        row_dtype: str = "float32",  # "float16", "bfloat16": embeddings in memory; not with a tier
        standby_deadline_s: float = 0.0,  # not 0: a standby may be attached
        is_standby: bool = False,  # refuses everything until take_over()
        num_sources: int = 0,  # not 0: refuses everything until serve()
        moved_shards: Sequence[tuple[int, int]] = [],  # virtual shards and their servers; else by default
    ) -> None: ...
    # FailedPreconditionError: it has one, or a dump is under way
    def attach_standby(self, address: str, incarnation: int) -> None: ...
    def release_standby(self) -> None: ...
    def fence(self, reason: str) -> None: ...  # answers nothing any more
    # "alone", "copying", "replicating", "stalled": its lease has expired, "broken", "fenced"
    @property
    def replication(self) -> str: ...
    def follow(self, primary: int) -> None: ...  # the incarnation of the primary of this standby
    # UnavailableError: the lease of the primary may be valid; FailedPreconditionError: never
    def take_over(self, primary_has_ended: bool) -> None: ...
    def renounce(self) -> bool: ...  # never takes over; False: it has
    @property
    def standby_state(self) -> str: ...  # "following", "taken over", "renounced", "unfit"
    @property
    def standby_failure(self) -> str: ...  # why it is unfit
    @property
    def has_copy(self) -> bool: ...  # all rows of its primary
    # The old server's end of a change of the number of servers (ADR 34), then the new one's.
    def begin_transfer(
        self,
        targets: Sequence[tuple[str, int]],  # address and incarnation, by index
        *,
        moved_shards: Sequence[tuple[int, int]] = [],  # of the targets
        max_processors: float,  # 0: no limit
        deadline_s: float,
    ) -> None: ...
    def hand_over(self) -> None: ...
    def resume(self) -> None: ...
    @property
    def transfer(self) -> dict[str, Any] | None: ...  # its progress
    @property
    def transfer_refusal(self) -> str: ...  # why there can be none; empty if there can
    @property
    def has_handed_over(self) -> bool: ...
    @property
    def was_sent_rows(self) -> bool: ...  # of one with `num_sources`: it has begun to gather
    def serve(self) -> None: ...
    @property
    def moved_shards(self) -> list[tuple[int, int]]: ...  # of all servers of its generation
    @property
    def shard_loads(self) -> list[int]: ...  # rows looked up lately by virtual shard: a sample
    @property
    def silent_for_s(self) -> float: ...  # since the last message of its primary
    def start(self, host: str, port: int) -> int: ...  # returns the port; may be called once
    def mark_loaded(self) -> None: ...
    def stop(self, timeout_s: float = 10.0) -> None: ...
    @property
    def incarnation(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def metrics(self) -> list[tuple[str, bool, str, float]]: ...  # (name, is_counter, help, value)
    def durations(self) -> dict[str, tuple[list[int], float, float]]: ...  # as DurationStats.snapshot()
    @property
    def store(self) -> EmbeddingStore: ...

class EmbeddingWorker:
    """The embedding worker role: engine, connections to the parameter servers, RPC service."""

    def __init__(
        self,
        *,
        slots: Sequence[SlotConfig],
        feature_index_prefix_bit: int,
        num_servers: int,
        forward_buffer_size: int = 1000,
        buffered_data_expired_s: int = 1000,
        num_handler_threads: int = 4,
        generation: int = 0,  # of the servers
        moved_shards: Sequence[tuple[int, int]] = [],
    ) -> None: ...
    def set_server(self, index: int, address: str) -> None: ...
    def replace_servers(
        self,
        addresses: Sequence[str],  # by index
        *,
        generation: int,
        moved_shards: Sequence[tuple[int, int]] = [],
    ) -> None: ...
    @property
    def moved_shards(self) -> list[tuple[int, int]]: ...
    def start(self, host: str, port: int) -> int: ...
    def stop(self, timeout_s: float = 10.0) -> None: ...
    def register_batch(
        self, loader_index: int, id_features: Buffer
    ) -> int: ...  # ResourceExhaustedError: full
    def release_waiting(self) -> int: ...  # how many batches that waited for their lookup
    @property
    def incarnation(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def metrics(self) -> list[tuple[str, bool, str, float]]: ...  # (name, is_counter, help, value)
    def slots(self) -> list[dict[str, Any]]: ...
    def slot_metrics(self) -> list[tuple[str, list[tuple[str, bool, str, float]]]]: ...  # as metrics()
    def channels(self) -> list[dict[str, Any]]: ...
    def channel_metrics(self) -> list[tuple[str, list[tuple[str, bool, str, float]]]]: ...
    def durations(self) -> dict[str, tuple[list[int], float, float]]: ...
    def server_loads(self, *, timeout_s: float = 60.0) -> list[dict[str, int]]: ...  # by parameter server

class EmbeddingClient:
    """Calls of an NN worker. Thread-safe; every call ends by `timeout_s`."""

    def configure(self, config: TrainConfig, *, replace: bool = False, timeout_s: float = 60.0) -> None: ...
    def lookup(
        self,
        reference: BatchReference,
        *,
        requires_grad: bool,
        timeout_s: float = 60.0,
        slots: int = 0,  # a bit for each mode; 0: all
        as_rows: bool = False,  # slots may come unpooled, for a pack: their `rows` are distinct ones
    ) -> LookupResult: ...
    def lookup_direct(
        self,
        worker_index: int,
        id_features: Buffer,
        *,
        requires_grad: bool,
        timeout_s: float = 60.0,
        slots: int = 0,
        original: BatchReference = ...,  # of the batch at a worker that has died
        as_rows: bool = False,
    ) -> LookupResult: ...
    def return_gradients(
        self,
        reference: BatchReference,
        gradients: Sequence[tuple[str, _SlotGradient]],
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
    def other_rows(self, what: str) -> OtherRows: ...

class OtherRows:
    """While rows are set, cleared or loaded: lookups of an exact context wait."""

    def __enter__(self) -> None: ...  # FailedPreconditionError: such a context has batches in flight
    def __exit__(self, *failure: object) -> None: ...

class RemoteClient(EmbeddingClient):
    def __init__(
        self,
        num_workers: int,
        *,
        wire_dtype: str = "float32",  # "float16", "bfloat16": how embeddings and gradients travel
    ) -> None: ...
    def channels(self) -> list[dict[str, Any]]: ...
    def channel_metrics(self) -> list[tuple[str, list[tuple[str, bool, str, float]]]]: ...
    def durations(self) -> dict[str, tuple[list[int], float, float]]: ...
    def set_worker(self, index: int, address: str) -> None: ...  # a new index adds a worker
    def retire_worker(self, index: int) -> None: ...  # asked only for the batches that it holds
    def drop_worker(self, index: int) -> None: ...  # its pending calls fail with UnavailableError
    # Of consistency="exact" (persia/pipeline/exact.py), whose batches are pooled and updated here.
    def begin_exact(
        self,
        *,
        slots: Sequence[SlotConfig],
        feature_index_prefix_bit: int,
        served: int = 0,
        max_bytes: int = 1073741824,  # of rows that no batch in flight needs
    ) -> None: ...
    def end_exact(self) -> None: ...  # for each begin_exact; until then other calls that train are refused
    def lookup_whole(
        self, reference: BatchReference, id_features: Buffer, *, timeout_s: float = 60.0
    ) -> LookupResult: ...  # of a reference 0, a direct lookup; all slots are absent
    def pool_exact(self, reference: BatchReference) -> LookupResult: ...
    def apply_exact(
        self,
        reference: BatchReference,
        gradients: Sequence[tuple[str, _SlotGradient]],
        *,
        scale: float = 1.0,
    ) -> None: ...
    def fail_exact(self, reference: BatchReference, what: str) -> None: ...
    # (name, is_counter, help, value); empty without an exact context
    def exact_metrics(self) -> list[tuple[str, bool, str, float]]: ...

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
        tier: TierOptions | None = None,
        row_dtype: str = "float32",
    ) -> None: ...
    def register_batch(self, loader_index: int, id_features: Buffer) -> BatchReference: ...
    def num_missing_rows(self) -> int: ...  # unique IDs that lookups have read as zeros, so far
    @property
    def store(self) -> EmbeddingStore: ...

class BagBatch:
    """A batch between its lookup and its update."""

class UpdateReport:
    num_updated: Final[int]
    num_missing: Final[int]
    num_nonfinite: Final[int]

class StoreStats:
    num_rows: Final[int]
    memory_bytes: Final[int]
    num_inserted: Final[int]
    num_evicted: Final[int]
    num_unadmitted: Final[int]
    num_updated: Final[int]
    num_missing: Final[int]
    num_nonfinite: Final[int]

class EmbeddingBags:
    """Pooled lookups and updates of a store in this process."""

    def __init__(
        self,
        *,
        slots: Sequence[SlotConfig],
        feature_index_prefix_bit: int,
        capacity: int = 1_000_000_000,
        num_internal_shards: int = 16,
        num_threads: int = 1,
        counts_updates: bool = False,
        row_dtype: str = "float32",
    ) -> None: ...
    def configure(self, config: TrainConfig, *, replace: bool = False) -> None: ...
    def lookup(
        self,
        values: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        *,
        train: bool,
        weights: NDArray[np.float32] | None = None,  # one a value
    ) -> tuple[NDArray[np.float32], BagBatch]: ...
    def update(self, batch: BagBatch, gradients: NDArray[np.float32]) -> UpdateReport: ...
    def set_rows(self, slot: int, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None: ...
    def stats(self) -> StoreStats: ...
    def clear(self) -> None: ...
    @property
    def store(self) -> EmbeddingStore: ...
