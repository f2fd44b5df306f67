"""Pooled embeddings of many slots as one torch module, with the engine in this process.

The module reads rows in the store, and its backward pass applies the sparse optimizer to them: there is no
weight of table size, no gradient of table size and no separate step. It is the same engine that embedding
workers and parameter servers run; here it needs neither broker nor servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from persia import _native, env
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source, described
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.service import CheckpointService
from persia.config import CheckpointingConfig, SlotConfig, SlotsConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.checks import checked_integer, type_name
from persia.embedding.optim import Optimizer
from persia.errors import ConfigError, FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from persia.job.runtime import local_share
from persia.logger import get_logger

if TYPE_CHECKING:
    from persia.nn.servers import ServerTable

    # What holds the rows. Both have the same calls, are thread-safe, and have applied an update when
    # `update` returns, or raise. Its batch is what the training lookup returned beside the rows.
    Engine = _native.EmbeddingBags | ServerTable

_logger = get_logger(__name__)

_DEFAULT_PREFIX_BITS = 8
_MAX_THREADS = 1024  # more is a mistake, which would use up the system's threads


@dataclass(frozen=True)
class BagStats:
    """What a module holds, and counts since it was made."""

    num_rows: int
    memory_bytes: int  # index, rows and order: everything the store holds
    num_inserted: int
    num_evicted: int
    num_unadmitted: int  # lookups of IDs that admission refused: read as zeros
    num_updated: int  # rows, each once a batch
    num_missing: int  # gradients dropped because their row had been evicted or never admitted
    num_nonfinite: int  # gradients dropped because their sum was NaN or infinite


class EmbeddingBagCollection(torch.nn.Module):
    """Sums of embedding rows, for many slots at once, trained by `backward()`.

    IDs are any 64-bit integers; a row is made when its ID is first seen in training. In `eval()` mode and
    under `no_grad()` unknown IDs read as zeros and nothing is inserted.

    Rows are no parameters: `parameters()` and `state_dict()` are empty, dense optimizers and DDP do not see
    them. Each process has rows of its own.

    Args:
        slots: slot name -> dim, or -> `persia.config.SlotConfig`, or a whole `SlotsConfig` with feature
            groups. Only pooled slots (`embedding_summation`, the default). The order is that of the inputs
            and of the output's columns.
        optimizer: of `persia.embedding.optim`; applied to a batch's rows in its backward pass.
        embedding_config: initial values, admission, weight bound; default `EmbeddingConfig()`.
        capacity: rows at most; beyond it those used the longest ago are evicted. Nothing is allocated ahead.
        num_internal_shards: shards of the store, at least as many as threads. Each has an equal
            share of the capacity and evicts for itself.
        num_threads: threads of a lookup or update, the caller's included; default `PERSIA_NUM_THREADS`, else
            `torch.get_num_threads()`. They sleep while torch computes.
        count_updates: of each row, for `export(min_updates=...)`; costs at most 16 bytes a row.
        row_dtype: of embeddings in memory: "float32", or in half the bytes "bfloat16" or "float16". Inputs,
            outputs, the arithmetic and the optimizer's state are float32 in any case.
        engine: what holds the rows (`persia.nn.convert` gives it); default a store in this process, to which
            the five arguments above apply.

    Raises:
        InvalidArgumentError: a value out of its range, a raw slot; the message names it.
        InvalidTypeError: an argument of another class, such as an optimizer of `torch.optim`.

    Examples:
        >>> ebc = EmbeddingBagCollection({"user": 16, "item": 16}, optimizer=Adagrad(lr=1e-2))
        >>> values = torch.tensor([7, 8, 100, 101, 102])  # users 7 and 8; items 100 and 101, 102
        >>> lengths = torch.tensor([[1, 1], [1, 2]])
        >>> ebc(values, lengths).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        slots: Mapping[str, int | SlotConfig] | SlotsConfig,
        optimizer: Optimizer,
        *,
        embedding_config: EmbeddingConfig | None = None,
        capacity: int = 1_000_000_000,
        num_internal_shards: int = 16,
        num_threads: int | None = None,
        count_updates: bool = False,
        row_dtype: str = "float32",
        engine: Engine | None = None,
    ) -> None:
        super().__init__()
        self.slots_config = slots if isinstance(slots, SlotsConfig) else _slots_config(slots)
        if names := ", ".join(self.slots_config.dense_slots):
            raise ConfigError(
                f"slots places {names} in the dense model, which an EmbeddingBagCollection is: it has all of "
                "its rows in this process; leave placement and dense_placement_threshold out"
            )
        self.embedding_config = embedding_config or EmbeddingConfig()
        self._num_threads = _num_threads(num_threads)
        self._bags = engine or _native.EmbeddingBags(
            slots=self.slots_config.native_slots(),
            feature_index_prefix_bit=self.slots_config.feature_index_prefix_bit,
            capacity=_in_range("capacity", capacity, 2**64 - 1),
            num_internal_shards=_in_range("num_internal_shards", num_internal_shards, 65536),
            num_threads=self._num_threads,
            counts_updates=count_updates,
            row_dtype=str(row_dtype),
        )
        self.counts_updates = count_updates and engine is None
        self._pid = os.getpid()
        self._has_warned = False
        # What makes the output require a gradient. No parameter: optimizers and DDP must not see it.
        self._anchor = torch.zeros((), requires_grad=True)
        self.optimizer = optimizer
        self.set_optimizer(optimizer)

    @property
    def slot_names(self) -> list[str]:
        """In the order of the inputs and of the output's columns."""
        return list(self.slots_config.slots_config)

    @property
    def out_features(self) -> int:
        """Columns of the output: the sum of the slots' dims."""
        return sum(slot.dim for slot in self.slots_config.slots_config.values())

    def forward(
        self,
        values: Any,
        lengths: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> Any:
        """Looks a batch up and pools it.

        Args:
            values: int64 or uint64 [total], the IDs of the first slot sample by sample, then those of the
                second, and so on; or a torchrec `KeyedJaggedTensor` whose keys are the slots.
            lengths: int64 [num_slots, batch]: how many IDs each sample has; not with a KeyedJaggedTensor.
            per_sample_weights: float32 [total], finite, what each ID's row is multiplied by; None is 1 each.
                A mean divides by the sum of a sample's weights, a root by that of their squares. They get no
                gradient; a KeyedJaggedTensor has its own.

        Returns:
            float32 [batch, sum of dims], on the device of `values`. A slot without IDs gives zeros. For a
            KeyedJaggedTensor, as torchrec's module of this name: a `KeyedTensor` of these values, with the
            slots as its keys and their dims as its `length_per_key`.

        Raises:
            InvalidArgumentError: shapes or lengths that do not fit each other or the slots.
            InvalidTypeError: another dtype or type.
            FailedPreconditionError: called in a fork of the process that made the module.
            ResourceExhaustedError: the batch alone has more IDs than the capacity, or memory ran out.
        """
        self._check_can_look_up()
        if isinstance(values, torch.Tensor):
            return self._pooled(values, lengths, per_sample_weights)
        pooled = self._pooled(*_of_keyed_jagged(self.slot_names, values, lengths, per_sample_weights))
        from torchrec import KeyedTensor  # no dependency: it is installed where a KeyedJaggedTensor is

        dims = [slot.dim for slot in self.slots_config.slots_config.values()]
        return KeyedTensor(keys=self.slot_names, length_per_key=dims, values=pooled)

    def _pooled(
        self, values: torch.Tensor, lengths: torch.Tensor | None, per_sample_weights: torch.Tensor | None
    ) -> torch.Tensor:
        if lengths is None:
            raise InvalidArgumentError("lengths is missing: give int64 [num_slots, batch] beside the values")
        check_tensor(lengths, "lengths", torch.int64, shape=" [num_slots, batch]")
        if lengths.dim() != 2:
            wanted = f"[{len(self.slot_names)} slots, batch]"
            raise InvalidArgumentError(f"lengths has the shape {list(lengths.shape)}, must be {wanted}")
        ids, counts, weights = _ids(values, "values"), _array(lengths), _weights(per_sample_weights)
        return self._look_up(ids, counts, self._update, weights).to(values.device)

    def _look_up(
        self,
        ids: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        on_gradient: Callable[[Any, torch.Tensor], None],
        weights: NDArray[np.float32] | None = None,
    ) -> torch.Tensor:
        """On the host. `on_gradient` gets the engine's batch and the gradient, in the backward pass."""
        if self.training and torch.is_grad_enabled():
            inputs = (self._anchor, self._bags, ids, lengths, weights, on_gradient)
            pooled: torch.Tensor = _PooledLookup.apply(*inputs)  # type: ignore[no-untyped-call]
            return pooled
        rows, _ = self._bags.lookup(ids, lengths, train=False, weights=weights)
        return torch.from_numpy(rows)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Changes settings of the same optimizer, such as its learning rate.

        Raises:
            FailedPreconditionError: what cannot change while there are rows, such as the kind of optimizer.
            InvalidTypeError: no optimizer of `persia.embedding.optim`.
        """
        check_optimizer(optimizer)
        self.register_embedding_optimizer(optimizer)

    def register_embedding_optimizer(self, optimizer: Optimizer) -> None:
        """As `set_optimizer`; the name by which `Optimizer.set_lr` knows it."""
        self._bags.configure(optimizer.train_config(self.embedding_config), replace=True)
        # After `configure`, which may refuse: the former optimizer then stays in force.
        self.optimizer.unsubscribe(self.register_embedding_optimizer)
        self.optimizer = optimizer
        optimizer.subscribe(self.register_embedding_optimizer)

    def set_embeddings(self, slot: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Sets the rows of `ids` (int64 or uint64 [n]) to `rows` (float32 [n, dim]), as for pretrained ones.

        Their optimizer state begins anew. Of an ID that is there twice, the last row stays.

        Raises:
            InvalidArgumentError: no such slot, wrong shapes, NaN or infinity, a slot with a hash stack.
            InvalidTypeError: another dtype or type.
        """
        names = self.slot_names
        if slot not in names:
            raise InvalidArgumentError(f"slot {slot!r} is not one of {', '.join(names)}")
        check_tensor(rows, "rows", torch.float32, shape=" [n, dim]")
        # A row that is not finite stays so in every update, and spreads to each sample that has its ID.
        if not torch.isfinite(rows).all():
            raise InvalidArgumentError(f"rows for slot {slot!r} have a NaN or an infinity: leave them out")
        self._bags.set_rows(names.index(slot), _ids(ids, "ids"), _array(rows))

    def stats(self) -> BagStats:
        """Rows, memory and counts, now."""
        stats = self._bags.stats()
        return BagStats(**{field.name: getattr(stats, field.name) for field in fields(BagStats)})

    def num_updates(self, signs: torch.Tensor) -> torch.Tensor:
        """How many updates each row has had since it was made, set or loaded: int64 [n] for signs int64 [n].

        Signs carry their group's prefix. FailedPreconditionError without `count_updates`.
        """
        counts = self._own_store().num_updates(_ids(signs, "signs"))
        return torch.from_numpy(counts.astype(np.int64))

    def dump(
        self,
        url: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep_last: int | None = None,
        with_state: bool = True,
        dump_percent: int = CheckpointingConfig().dump_percent,
    ) -> None:
        """Writes all rows, with or without optimizer state, to a directory or URL (docs/checkpoints.md).

        What was there stays readable until the new checkpoint is complete. `keep_last=N` makes `url` a
        directory of checkpoints, named by `step`, of which N are kept. While another thread trains the rows,
        writing takes `dump_percent` of the processors on average; with 100 it never rests.

        Raises:
            InvalidArgumentError: a `dump_percent` that is none.
            StorageError: the disk or the storage service refused; what was there before counts.
        """
        self._checkpoints(_in_range("dump_percent", dump_percent, 100)).dump(
            DumpRequest(
                url,
                step=step,
                keep_last=keep_last,
                optimizer=described(self.optimizer),
                with_state=with_state,
            )
        )

    def load(self, url: str | os.PathLike[str], *, strict: bool = True, with_state: bool = True) -> None:
        """Replaces all rows by those of a checkpoint, of this class or of a cluster with the same slots.

        Hyper-parameters of the optimizer stay those of this collection. `strict=False` accepts that slots
        were added or removed since, `with_state=False` begins with the optimizer's state of new rows.

        Raises:
            NotFoundError, CorruptionError: no checkpoint, or one that is not whole; rows are as they were.
            FailedPreconditionError: other slots than here, or rows that have no state.
            InvalidArgumentError: another kind of optimizer, whose state is of no use here.
        """
        config = self.optimizer.train_config(self.embedding_config)
        self._checkpoints().load(
            Source(url), train_config=config.encode(), strict=strict, fresh_state=not with_state
        )

    def clear(self) -> None:
        """Removes all rows."""
        self._bags.clear()

    def extra_repr(self) -> str:
        slots = ", ".join(f"{name}={slot.dim}" for name, slot in self.slots_config.slots_config.items())
        return f"{slots}; {type(self.optimizer).__name__}, rows={self._bags.stats().num_rows}"

    def __reduce__(self) -> NoReturn:
        # Asked by copy and pickle, which would make a second object over the rows of this one.
        raise FailedPreconditionError(
            f"an {type(self).__name__} cannot be copied or pickled: its rows are in this process's store. "
            "Save them with `dump()`, and `state_dict()` of the dense modules beside them"
        )

    def _check_can_look_up(self) -> None:
        # Data loaders of torch fork. A fork lacks the engine's threads and would wait for them.
        if self._pid != os.getpid():
            raise FailedPreconditionError(
                f"this process is a fork of the one that made the {type(self).__name__}, whose threads and "
                "rows it lacks: look IDs up there, or make a collection here"
            )

    def _own_store(self) -> _native.EmbeddingStore:
        if isinstance(self._bags, _native.EmbeddingBags):
            return self._bags.store
        raise FailedPreconditionError(
            f"the rows of this {type(self).__name__} are in parameter servers: dump and load them by the "
            "`Servers` that job_servers() gave"
        )

    def _checkpoints(self, dump_percent: int = CheckpointingConfig().dump_percent) -> Checkpoints:
        share = local_share(
            self._own_store(), self.slots_config, self._num_threads, dump_percent=dump_percent
        )
        # A process alone coordinates itself: the same dump as that of a cluster, with one peer in memory.
        peer = LocalPeer(CheckpointService(share))
        return Checkpoints(lambda: [peer], deadline_s=env.get_deadline_s())

    def _update(self, batch: Any, gradient: torch.Tensor) -> None:
        report = self._bags.update(batch, _array(gradient))
        if report.num_nonfinite and not self._has_warned:
            # Once: a model that diverges would write a line for every batch.
            self._has_warned = True
            _logger.warning(
                "the gradients of %d rows were NaN or infinite and were dropped; later ones are only counted",
                report.num_nonfinite,
            )


class _PooledLookup(torch.autograd.Function):
    """A training lookup, which hands its gradient to `on_gradient`. Rows are no tensors of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        bags: Engine,
        ids: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        weights: NDArray[np.float32] | None,
        on_gradient: Callable[[Any, torch.Tensor], None],
    ) -> torch.Tensor:
        rows, ctx.batch = bags.lookup(ids, lengths, train=True, weights=weights)
        ctx.on_gradient = on_gradient
        return torch.from_numpy(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        ctx.on_gradient(ctx.batch, gradient)
        return (None,) * 6


def _of_keyed_jagged(
    slot_names: list[str], keyed: Any, lengths: torch.Tensor | None, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if not all(hasattr(keyed, name) for name in ("keys", "values", "lengths", "weights_or_none")):
        raise InvalidTypeError(
            f"values is a {type(keyed).__name__}, must be a torch.Tensor of IDs or a KeyedJaggedTensor"
        )
    if lengths is not None:
        raise InvalidArgumentError("lengths was given beside a KeyedJaggedTensor, which has its own")
    if weights is not None:
        raise InvalidArgumentError(
            "per_sample_weights was given beside a KeyedJaggedTensor: give it weights of its own"
        )
    # Another order would look IDs up in slots of other features without any error.
    if list(keyed.keys()) != slot_names:
        raise InvalidArgumentError(
            f"the KeyedJaggedTensor has the keys {list(keyed.keys())}, must have the slots in their "
            f"order: {slot_names}"
        )
    if keyed.variable_stride_per_key():
        raise InvalidArgumentError(
            "the KeyedJaggedTensor has another batch size for each key, which is not supported"
        )
    # Its lengths may be int32.
    counts = keyed.lengths().to(torch.int64).view(len(slot_names), -1)
    return keyed.values(), counts, keyed.weights_or_none()


def check_optimizer(optimizer: object) -> None:
    """Raises InvalidTypeError unless it is one of `persia.embedding.optim`."""
    if not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(
            f"optimizer is {type_name(optimizer)}: use one of persia.embedding.optim, such as Adagrad(lr=0.1)"
        )


def _slots_config(slots: Mapping[str, int | SlotConfig]) -> SlotsConfig:
    if not isinstance(slots, Mapping):
        raise InvalidTypeError(
            f"slots is {_kind(slots)}, must be a mapping of names to dims, or a SlotsConfig"
        )
    configs: dict[str, Any]  # checked below, where the names of the wrong ones are known
    configs = {n: slot if isinstance(slot, SlotConfig) else {"dim": slot} for n, slot in slots.items()}
    return SlotsConfig(slots_config=configs, feature_index_prefix_bit=prefix_bits(len(configs)))


def prefix_bits(num_slots: int) -> int:
    """For slots that are groups of their own, numbered from 1 in the top bits of their signs."""
    # More bits than slots need would take them from the IDs, which are folded to what is left.
    return max(_DEFAULT_PREFIX_BITS, num_slots.bit_length())


def _in_range(name: str, value: int, maximum: int) -> int:
    if not 1 <= checked_integer(name, value) <= maximum:
        raise InvalidArgumentError(f"{name}={value} must be an integer from 1 to {maximum}")
    return int(value)


def _num_threads(given: int | None) -> int:
    if given is not None:
        return _in_range("num_threads", given, _MAX_THREADS)
    # The variable bounds engines of a process where several share a host; torch has a number of its own.
    from_env = env.get_num_threads()
    if from_env is not None:
        return _in_range("PERSIA_NUM_THREADS", from_env, _MAX_THREADS)
    return min(torch.get_num_threads(), _MAX_THREADS)


def _kind(value: object) -> str:
    """What to call it in a message: a tensor by its dtype, anything else by its class."""
    return str(value.dtype) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """On the host and contiguous; the tensor's own memory where it is that already.

    A gradient may come with any strides (a sum's has none) and as a lazy negative or conjugate.
    """
    array: NDArray[Any] = tensor.detach().contiguous().numpy(force=True)
    return array


def check_tensor(value: object, name: str, *dtypes: torch.dtype, shape: str = "") -> None:
    """Raises InvalidTypeError unless it is a tensor of one of `dtypes`."""
    if not isinstance(value, torch.Tensor) or value.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise InvalidTypeError(f"{name} is {_kind(value)}, must be a {wanted} tensor{shape}")


def _ids(values: torch.Tensor, name: str) -> NDArray[np.uint64]:
    check_tensor(values, name, torch.int64, torch.uint64)
    return _array(values).view(np.uint64)


def _weights(weights: torch.Tensor | None) -> NDArray[np.float32] | None:
    if weights is None:
        return None
    check_tensor(weights, "per_sample_weights", torch.float32, shape=", one a value")
    if weights.requires_grad:
        raise InvalidArgumentError(
            "per_sample_weights requires a gradient, which the lookup does not give: pass .detach()"
        )
    return _array(weights)
