"""What `convert` puts in the place of `nn.Embedding` and `nn.EmbeddingBag`: the same over rows of a store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Optimizer
from persia.errors import FailedPreconditionError, InvalidArgumentError
from persia.nn.embedding_bag_collection import EmbeddingBagCollection, check_tensor

if TYPE_CHECKING:
    from persia.nn.embedding_bag_collection import Engine

SLOT = "rows"
_BLOCK_BYTES = 64 << 20  # of a weight that is taken over at a time


@dataclass(frozen=True)
class BagGradients:
    """The gradient of one lookup's bags."""

    ids: NDArray[np.uint64]  # [total], bag after bag
    lengths: NDArray[np.int64]  # [batch]
    gradient: torch.Tensor  # float32 [batch, dim], on the host
    batch: Any  # the lookup itself, as its engine wants it back; None: of another rank, or several joined


Uses = dict[int, list[BagGradients]]  # by the number of the rows


class Exchange(Protocol):
    """What several ranks do between the end of a backward pass and its updates."""

    def __call__(self, updates: PendingUpdates, uses: Uses) -> Uses:
        """A rank's own gradients in, those that it is to apply out."""

    def together(self) -> AbstractContextManager[None]:
        """Around the updates."""


class _Pass:
    """A backward pass. Its callback alone keeps it: what a pass that failed had gathered goes with it."""

    def __init__(self) -> None:
        self.uses: Uses = {}


class PendingUpdates:
    """Updates of all rows that one `convert()` made. They wait for the end of a backward pass.

    A module that is used several times in one forward pass gets a gradient for every use. Torch adds them up
    before the optimizer sees them; here they are gathered until autograd has finished, and applied at once.
    At the same place ranks exchange what they are about to apply (`persia.nn.replicas`).
    """

    def __init__(self, exchange: Exchange | None = None) -> None:
        self.rows: list[StoreRows] = []
        self.exchange = exchange
        self._passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()  # by autograd's number

    def register(self, rows: StoreRows) -> int:
        """Returns the number under which `add` knows them."""
        self.rows.append(rows)
        return len(self.rows) - 1

    def add(self, number: int, gradients: BagGradients) -> None:
        """Only within a backward pass; they are applied at its end."""
        # Backward passes of several threads, or one inside another, are told apart by autograd's own number.
        number_of_pass = torch._C._current_graph_task_id()
        current = self._passes.get(number_of_pass)
        if current is None:
            current = self._passes[number_of_pass] = _Pass()
            # What DDP finishes its reductions by, too.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._apply, current))
        current.uses.setdefault(number, []).append(gradients)

    def _apply(self, finished: _Pass) -> None:
        # Taken out first: if an update raises, the gradients of the pass are gone, and not applied twice.
        uses, finished.uses = finished.uses, {}
        together: AbstractContextManager[None] = contextlib.nullcontext()
        if self.exchange is not None:
            uses = self.exchange(self, uses)
            together = self.exchange.together()
        with together:
            # In one order on all ranks, which may have used their modules in different orders.
            for number in sorted(uses):
                self.rows[number].apply_gradients(uses[number])


class StoreRows(EmbeddingBagCollection):
    """The rows of one weight: an `EmbeddingBagCollection` with one slot, shared by the modules tied to it.

    Args:
        name: of the module, for messages.
        num_embeddings: IDs must be below it; None: any 64-bit integer is an ID.
        updates: applies the gradients at the end of a backward pass.
        engine: where the rows are; None: in this process.
        Others are those of `EmbeddingBagCollection`.
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        num_embeddings: int | None,
        optimizer: Optimizer,
        updates: PendingUpdates,
        *,
        embedding_config: EmbeddingConfig,
        capacity: int,
        count_updates: bool = False,
        engine: Engine | None = None,
    ) -> None:
        # Threads divide slots, and here is one.
        super().__init__(
            {SLOT: embedding_dim},
            optimizer,
            embedding_config=embedding_config,
            capacity=capacity,
            # A shard without room for one row is refused, and tables of a few rows are common.
            num_internal_shards=min(16, capacity),
            num_threads=1,
            count_updates=count_updates,
            engine=engine,
        )
        self.in_servers = engine is not None
        self.name = name
        self.embedding_dim = embedding_dim
        self.num_embeddings = num_embeddings
        self._updates = updates
        self._number = updates.register(self)

    def take_over(self, weight: torch.Tensor) -> None:
        """Row i becomes the row of ID i."""
        # In blocks: with a weight of many gigabytes the process has no room for a second one.
        blocks = self.id_blocks(torch.arange(len(weight)))
        for ids in blocks:
            self.set_embeddings(SLOT, ids, weight[ids].detach().cpu())
        # When all are there: later ones may have taken the room of earlier ones.
        num_lost = 0
        for ids in blocks:
            # A row that was evicted reads as zeros; one that is zeros in the weight is not missed.
            is_zero = ~self.read(ids).any(1)
            num_lost += int((weight[ids].detach().cpu().any(1) & is_zero).sum())
        if num_lost:
            whose = "the parameter servers'" if self.in_servers else "the store's"
            raise InvalidArgumentError(
                f"capacity is too small for {self.name!r}: {num_lost} of {len(weight)} rows had to go. Each "
                f"of {whose} shards has an equal share: allow a tenth more than the number of rows"
            )

    def id_blocks(self, ids: torch.Tensor) -> Sequence[torch.Tensor]:
        """Parts of `ids` whose rows are read or written at a time."""
        return torch.split(ids, max(1, _BLOCK_BYTES // (4 * self.embedding_dim)))

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows [n, dim] of int64 [n]; zeros where there is none."""
        signs = ids.numpy().view(np.uint64)
        rows, _ = self._bags.lookup(signs, np.ones((1, len(signs)), np.int64), train=False)
        return torch.from_numpy(rows)

    def apply_gradients(self, uses: Sequence[BagGradients]) -> None:
        """Updates each row once, by the sum of its gradients in `uses`."""
        # The lookup of the forward pass has found the rows already, and its engine can update them in place.
        if len(uses) == 1 and uses[0].batch is not None:
            self._update(uses[0].batch, uses[0].gradient)
            return
        ids = np.concatenate([use.ids for use in uses])
        lengths = np.concatenate([use.lengths for use in uses])
        # The rows exist, or are made as every rank makes them: the lookup is for its plan of all uses.
        _, batch = self._bags.lookup(ids, lengths[np.newaxis], train=True)
        self._update(batch, torch.cat([use.gradient for use in uses]))

    def pool(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Sums of rows.

        Args:
            ids: an integer dtype [total], bag after bag.
            lengths: int64 [batch].

        Returns:
            float32 [batch, dim], on the device of `ids`.
        """
        self._check_can_look_up()
        # The store is on the host; int32 IDs are widened, as a negative one must stay negative for the check.
        own = ids.detach().to("cpu", torch.int64)
        self._check_ids(own)
        counts = lengths.cpu().contiguous().numpy()
        # A copy: the caller may fill its tensor with the next batch before backward.
        signs = np.array(own.numpy(), copy=True).view(np.uint64)
        if self.training and torch.is_grad_enabled():
            self._check_ranks()

        # Applied later: another use of the same rows in the same pass may follow.
        def gather(batch: Any, gradient: torch.Tensor) -> None:
            host = gradient.detach().to("cpu", torch.float32)
            self._updates.add(self._number, BagGradients(signs, counts, host, batch))

        return self._look_up(signs, counts[np.newaxis], gather).to(ids.device)

    def extra_repr(self) -> str:
        ids = "any IDs" if self.num_embeddings is None else f"{self.num_embeddings} IDs"
        where = "in parameter servers" if self.in_servers else f"rows={self.stats().num_rows}"
        return f"{ids}, dim={self.embedding_dim}; {type(self.optimizer).__name__}, {where}"

    def _check_ids(self, ids: torch.Tensor) -> None:
        if self.num_embeddings is None or not len(ids):
            return
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self.num_embeddings:
            raise InvalidArgumentError(
                f"{self.name!r} was given the ID {low if low < 0 else high}, must be from 0 to "
                f"{self.num_embeddings - 1}: convert(..., grow=True) gives IDs beyond the old vocabulary rows"
            )

    def _check_ranks(self) -> None:
        dist = torch.distributed
        if self._updates.exchange is None and dist.is_available() and dist.is_initialized():
            world_size = dist.get_world_size()
            if world_size > 1:
                raise FailedPreconditionError(
                    f"{self.name!r} is trained on {world_size} ranks, each of which has rows of its own that "
                    "would drift apart: convert(..., process_group=torch.distributed.group.WORLD) keeps them "
                    "equal"
                )


class StoreModule(nn.Module):
    """What both modules share: no parameters; `load_state_dict` takes the original's weight over."""

    def __init__(self, rows: StoreRows, padding_idx: int | None) -> None:
        super().__init__()
        self.rows = rows
        self.embedding_dim = rows.embedding_dim
        self.padding_idx = padding_idx

    @property
    def num_embeddings(self) -> int | None:
        """The vocabulary; None when it grows."""
        return self.rows.num_embeddings

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} has no weight: its rows are in a store. Call it to read rows, or "
                "persia.nn.export the model"
            )
        return super().__getattr__(name)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        # Not a parameter here, so torch would report it as unexpected.
        weight = state_dict.pop(prefix + "weight", None)
        if weight is not None:
            self.load_weight(weight)
            # What else there is comes from the weight, too.
            state_dict.update((prefix + name, buffer) for name, buffer in self.named_buffers(recurse=False))
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def load_weight(self, weight: torch.Tensor) -> None:
        """Row i of float32 [n, dim] becomes that of ID i; its optimizer state begins anew."""
        if weight.dim() != 2 or weight.shape[1] != self.embedding_dim:
            raise InvalidArgumentError(
                f"the weight for {self.rows.name!r} has the shape {list(weight.shape)}, must be [n, "
                f"{self.embedding_dim}]"
            )
        self.rows.take_over(weight)


class StoreEmbedding(StoreModule):
    """`nn.Embedding` over the `rows` of a store: one row for each ID.

    The row of `padding_idx` is constant, as in torch, where it never has a gradient: a buffer, `padding_row`.
    """

    padding_row: torch.Tensor  # None without padding_idx

    def __init__(self, rows: StoreRows, padding_idx: int | None = None) -> None:
        super().__init__(rows, padding_idx)
        self.register_buffer("padding_row", None if padding_idx is None else torch.zeros(self.embedding_dim))

    def load_weight(self, weight: torch.Tensor) -> None:
        super().load_weight(weight)
        if self.padding_idx is not None:
            self.padding_row = weight[self.padding_idx].detach().clone()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [*, dim] for integers [*]."""
        check_tensor(input, "input", torch.int32, torch.int64)
        ids, shape = input.reshape(-1), (*input.shape, self.embedding_dim)
        if self.padding_idx is None:
            return self.rows.pool(ids, torch.ones(len(ids), dtype=torch.int64)).view(shape)
        is_id = torch.ne(ids, self.padding_idx)
        # The padding has a bag without IDs, whose zeros are replaced below: its row must not be made or
        # updated.
        rows = self.rows.pool(ids[is_id], is_id.to(torch.int64))
        return torch.where(is_id.unsqueeze(1), rows, self.padding_row).view(shape)

    def extra_repr(self) -> str:
        return "" if self.padding_idx is None else f"padding_idx={self.padding_idx}"


class StoreEmbeddingBag(StoreModule):
    """`nn.EmbeddingBag` over the `rows` of a store, for `mode` "sum" and "mean".

    `padding_idx` and `include_last_offset` are those of `nn.EmbeddingBag`.
    """

    def __init__(
        self, rows: StoreRows, mode: str, padding_idx: int | None = None, include_last_offset: bool = False
    ) -> None:
        super().__init__(rows, padding_idx)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 [bags, dim]; arguments are those of `nn.EmbeddingBag`. A bag without IDs gives zeros."""
        check_tensor(input, "input", torch.int32, torch.int64)
        if per_sample_weights is not None:
            self._check_weights(input, per_sample_weights)
        lengths = self._lengths(input, offsets)
        ids = input.reshape(-1)
        if self.padding_idx is not None:
            is_id = torch.ne(ids, self.padding_idx)
            # A mean of torch does not count the padding, so it leaves both IDs and lengths.
            bags = torch.repeat_interleave(lengths)
            lengths = torch.bincount(bags[is_id], minlength=len(lengths))
            ids = ids[is_id]
            per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)[is_id]
        if per_sample_weights is not None:
            return self._weighted(ids, lengths, per_sample_weights.reshape(-1))
        sums = self.rows.pool(ids, lengths)
        return sums / lengths.clamp(min=1).unsqueeze(1) if self.mode == "mean" else sums

    def _weighted(self, ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The store's sums know no weights: rows come one by one, and autograd sees each product."""
        rows = self.rows.pool(ids, torch.ones(len(ids), dtype=torch.int64)) * weights.unsqueeze(1)
        return rows.new_zeros(len(lengths), self.embedding_dim).index_add(
            0, torch.repeat_interleave(lengths), rows
        )

    def _lengths(self, input: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        if input.dim() == 2:
            if offsets is not None:
                raise InvalidArgumentError("offsets was given beside a 2D input, whose rows are the bags")
            return torch.full((input.shape[0],), input.shape[1], dtype=torch.int64, device=input.device)
        if input.dim() != 1:
            raise InvalidArgumentError(
                f"input has the shape {list(input.shape)}, must have 1 or 2 dimensions"
            )
        if offsets is None:
            raise InvalidArgumentError("offsets is missing: a 1D input needs where each of its bags begins")
        check_tensor(offsets, "offsets", torch.int32, torch.int64)
        ends = offsets.new_full((0 if self.include_last_offset else 1,), len(input))
        bounds = torch.cat([offsets, ends])
        lengths = bounds.diff().to(torch.int64)
        # Checked although it costs a pass: a wrong offset would pool IDs of another bag without an error.
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(input) or (lengths < 0).any():
            raise InvalidArgumentError(
                f"offsets must begin with 0, not fall, and stay within the {len(input)} IDs of input"
                + (", and end with their number" if self.include_last_offset else "")
            )
        return lengths

    def _check_weights(self, input: torch.Tensor, weights: torch.Tensor) -> None:
        if self.mode != "sum":
            raise InvalidArgumentError(
                f"per_sample_weights was given with mode={self.mode!r}, must be used with mode='sum'"
            )
        if weights.shape != input.shape:
            raise InvalidArgumentError(
                f"per_sample_weights has the shape {list(weights.shape)}, must have that of input, "
                f"{list(input.shape)}"
            )

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"mode={self.mode!r}{padding}"
