"""Lookups in plain torch operations: what `export` puts in the place of modules over a store.

Nothing here knows the store. Rows are looked up by a search among sorted keys, and an ID without a row reads
as zeros, as in `eval()`. Sums run over a bag's IDs in their order, as the engine's do, so that results are
equal to the last bit. The code keeps to what TorchScript compiles (so annotations are no strings), and no
shape depends on values, for `torch.export`.
"""

# For torch.jit.is_scripting; a comment at its line would be read by TorchScript.
# mypy: disable-error-code="attr-defined"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from persia.config import SlotsConfig


@dataclass(frozen=True)
class ExportedSlot:
    """What a collection's lookup has to know of a slot."""

    dim: int
    prefix: int  # int64: what its group puts in the top bits of a sign
    sqrt_scaling: bool = False
    rounds: int = 0  # of the hash stack, and the buckets of each
    size: int = 0

    def signs(self, ids: torch.Tensor, id_bits: int) -> torch.Tensor:
        """Those of int64 [n], in the order of the rounds; int64 [n * rounds], at least [n]."""
        if self.rounds == 0:
            return fold(ids, id_bits) + self.prefix
        columns = []
        for number in range(self.rounds):
            ids = sign_hash(ids)
            bucket = unsigned_modulo(ids, torch.tensor(self.size)) + number * self.size
            columns.append(bucket + self.prefix)
        return torch.stack(columns, dim=1).reshape(-1)


def exported_slots(config: SlotsConfig) -> dict[str, ExportedSlot]:
    """The slots of a job or collection, by name and in their order."""
    numbers = config.group_numbers()
    slots = {}
    for name, slot in config.slots_config.items():
        prefix = numbers[name] << (64 - config.feature_index_prefix_bit)
        stack = slot.hash_stack
        slots[name] = ExportedSlot(
            dim=slot.dim,
            # An int64 of the same bits, which is what torch computes with.
            prefix=prefix - (1 << 64) if prefix >= 1 << 63 else prefix,
            sqrt_scaling=slot.sqrt_scaling,
            rounds=stack.hash_stack_rounds if stack else 0,
            size=stack.embedding_size if stack else 0,
        )
    return slots


class KeyedRows(nn.Module):
    """A table by key.

    Args:
        keys: int64 [n], ascending, none twice; None: the keys are 0 to n - 1, and others an error.
        rows: float32 [n, dim]. With `is_padded` [n + 1, dim], the last one zeros: it is not copied.
        id_bits: what is wanted are IDs, which are folded to so many bits first; 64: they are keys.
    """

    def __init__(
        self, keys: torch.Tensor | None, rows: torch.Tensor, id_bits: int = 64, *, is_padded: bool = False
    ) -> None:
        super().__init__()
        self.id_bits = id_bits
        self.is_dense = keys is None
        self.dim = rows.shape[1]
        self.num_keys = len(rows) - int(is_padded)
        # Of powers of two below the number of keys: the steps of a binary search.
        self.steps = [2**i for i in reversed(range(max(self.num_keys, 1).bit_length()))]
        self.register_buffer("keys", torch.empty(0, dtype=torch.int64) if keys is None else keys)
        # The last row is that of keys that are missing.
        is_whole = keys is None or is_padded
        self.register_buffer("rows", rows if is_whole else torch.cat([rows, rows.new_zeros(1, self.dim)]))

    keys: torch.Tensor
    rows: torch.Tensor

    def forward(self, wanted: torch.Tensor) -> torch.Tensor:
        """float32 [*, dim] for int64 [*]."""
        return nn.functional.embedding(self._find(wanted), self.rows)

    def _find(self, wanted: torch.Tensor) -> torch.Tensor:
        """Where the rows of int64 [m] are: int64 [m], numbers of `rows`."""
        if self.is_dense:
            return wanted
        if self.num_keys == 0:
            return torch.zeros_like(wanted)
        if self.id_bits < 64:
            wanted = fold(wanted, self.id_bits)
        # Beyond the last key: any index will do, as the key there differs.
        place = self._lower_bound(wanted).clamp(max=self.num_keys - 1)
        missing = torch.full_like(place, self.num_keys)
        return torch.where(self.keys[place] == wanted, place, missing)

    def _lower_bound(self, wanted: torch.Tensor) -> torch.Tensor:
        """The number of keys below each of int64 [*]."""
        if not torch.jit.is_scripting():  # noqa: SIM102
            if torch.onnx.is_in_onnx_export():
                return self._lower_bound_by_halves(wanted)
        return torch.searchsorted(self.keys, wanted)

    def _lower_bound_by_halves(self, wanted: torch.Tensor) -> torch.Tensor:
        """ONNX has no searchsorted: `below` grows as long as the last key before its new end is below."""
        below = torch.zeros_like(wanted)
        for step in self.steps:
            end = (below + step).clamp(max=self.num_keys)
            below = torch.where(self.keys[end - 1] < wanted, end, below)
        return below


class ExportedEmbedding(nn.Module):
    """`nn.Embedding` without a vocabulary's bound. `padding_row` [dim] is what `padding_idx` reads."""

    def __init__(self, table: KeyedRows, padding_idx: int | None, padding_row: torch.Tensor | None) -> None:
        super().__init__()
        self.table = table
        self.has_padding = padding_idx is not None
        self.padding_idx = -1 if padding_idx is None else padding_idx
        empty = torch.empty(0)
        self.register_buffer("padding_row", empty if padding_row is None else padding_row.clone())

    padding_row: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [*, dim] for integers [*]."""
        ids = input.to(torch.int64)
        rows: torch.Tensor = self.table(ids)
        if self.has_padding:
            rows = torch.where((ids == self.padding_idx).unsqueeze(-1), self.padding_row, rows)
        return rows


class ExportedEmbeddingBag(nn.Module):
    """`nn.EmbeddingBag` for "sum" and "mean"."""

    def __init__(
        self, table: KeyedRows, mode: str, padding_idx: int | None, include_last_offset: bool
    ) -> None:
        super().__init__()
        self.table = table
        self.mode = mode
        self.has_padding = padding_idx is not None
        self.padding_idx = -1 if padding_idx is None else padding_idx
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 [bags, dim]; arguments are those of `nn.EmbeddingBag`."""
        ids = input.reshape(-1).to(torch.int64)
        if offsets is None:
            count, size = input.shape[0], input.shape[1]
            begins = torch.arange(0, count, device=ids.device) * size
        elif self.include_last_offset:
            begins = offsets[:-1].to(torch.int64)
        else:
            begins = offsets.to(torch.int64)
        is_id = torch.ones_like(ids)
        if self.has_padding:
            is_id = (ids != self.padding_idx).to(torch.int64)
        weights = is_id.to(torch.float32)
        if per_sample_weights is not None:
            weights = weights * per_sample_weights.reshape(-1)
        # Padding is multiplied by zero instead of left out: shapes must not depend on values.
        rows: torch.Tensor = self.table(ids) * weights.unsqueeze(1)
        bags = bag_of_each(begins, ids.shape[0])
        sums = rows.new_zeros(begins.shape[0], self.table.dim).index_add(0, bags, rows)
        if self.mode == "mean":
            counts = torch.zeros_like(begins).index_add(0, bags, is_id)
            # At least 1: a bag without IDs gives zeros, not NaN.
            sums = sums / counts.clamp(min=1).unsqueeze(1)
        return sums


class ExportedBagCollection(nn.Module):
    """`EmbeddingBagCollection`: slots of one dim share a table, whose keys are the engine's signs.

    Args:
        tables: by dim, with the signs of that dim's slots as keys.
        slots: in the order of the inputs and of the output's columns.
        prefix_bits: how many of a sign's bits are the prefix.
    """

    def __init__(self, tables: dict[int, KeyedRows], slots: Sequence[ExportedSlot], prefix_bits: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([tables[dim] for dim in sorted(tables)])
        self.table_of_slot = [sorted(tables).index(slot.dim) for slot in slots]
        self.id_bits = 64 - prefix_bits
        self.max_rounds = max(slot.rounds for slot in slots)
        self.register_buffer("prefixes", torch.tensor([slot.prefix for slot in slots]))
        self.register_buffer("rounds", torch.tensor([slot.rounds for slot in slots]))
        self.register_buffer("sizes", torch.tensor([max(slot.size, 1) for slot in slots]))
        self.register_buffer("is_scaled", torch.tensor([slot.sqrt_scaling for slot in slots]).unsqueeze(1))

    prefixes: torch.Tensor
    rounds: torch.Tensor
    sizes: torch.Tensor
    is_scaled: torch.Tensor

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """float32 [batch, sum of dims]; int64 `values` [total] and `lengths` [num_slots, batch]."""
        num_slots, batch = lengths.shape[0], lengths.shape[1]
        counts = lengths.reshape(-1)
        bags = bag_of_each(counts.cumsum(0) - counts, values.shape[0])
        slots = torch.div(bags, max(batch, 1), rounding_mode="floor")
        # For all slots at once: a loop over slots would have shapes that depend on `lengths`.
        signs = self._signs(values, slots)
        bags_of_signs = bags.unsqueeze(1).expand(-1, signs.shape[1]).reshape(-1)
        num_rows = lengths * self.rounds.clamp(min=1).unsqueeze(1)
        # Bags of one row are not scaled, and division by the root of one is exact, so all take one path.
        roots = torch.where(self.is_scaled & (num_rows > 1), num_rows, torch.ones_like(num_rows))
        factors = (1.0 / roots.to(torch.float32).sqrt()).unsqueeze(2)
        pooled: list[torch.Tensor] = []
        for table in self.tables:
            rows = table(signs.reshape(-1))
            dim = rows.shape[1]
            sums = rows.new_zeros(num_slots * batch, dim).index_add(0, bags_of_signs, rows)
            pooled.append(sums.view(num_slots, batch, dim) * factors)
        columns = [pooled[place][slot] for slot, place in enumerate(self.table_of_slot)]
        return torch.cat(columns, dim=1)

    def _signs(self, values: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """int64 [total, rounds at most, at least 1]; 0, which no row has, where a slot has fewer."""
        rounds, sizes = self.rounds[slots], self.sizes[slots]
        prefixes = self.prefixes[slots]
        plain = fold(values, self.id_bits) + prefixes
        if self.max_rounds == 0:
            return plain.unsqueeze(1)
        columns: list[torch.Tensor] = []
        hashed = values
        for number in range(self.max_rounds):
            hashed = sign_hash(hashed)
            bucket = unsigned_modulo(hashed, sizes) + number * sizes + prefixes
            columns.append(torch.where(rounds > number, bucket, torch.zeros_like(bucket)))
        columns[0] = torch.where(rounds == 0, plain, columns[0])
        return torch.stack(columns, dim=1)


def bag_of_each(begins: torch.Tensor, total: int) -> torch.Tensor:
    """The bag of each of `total` IDs, int64, where bag b begins at begins[b]: how many begin until there."""
    marks = torch.zeros(total + 1, dtype=torch.int64, device=begins.device)
    return marks.scatter_add(0, begins, torch.ones_like(begins)).cumsum(0)[:total] - 1


# The engine's arithmetic is that of 64 bits without a sign; torch's int64 wraps around to the same bits.


def fold(ids: torch.Tensor, id_bits: int) -> torch.Tensor:
    """ID modulo 2^id_bits - 1."""
    modulus = (1 << id_bits) - 1
    folded = (ids & modulus) + shifted_right(ids, id_bits)
    # Twice: the sum of both halves is at most twice the modulus, and the modulus itself must become 0.
    folded = torch.where(folded >= modulus, folded - modulus, folded)
    return torch.where(folded >= modulus, folded - modulus, folded)


def sign_hash(signs: torch.Tensor) -> torch.Tensor:
    """FarmHash64 of eight bytes, as native/src/base/hash.h has it; constants are int64 of the same bits."""
    mul = -7286425919675154353 + 16
    a = signs + -7286425919675154353
    c = rotated_right(signs, 37) * mul + a
    d = (rotated_right(a, 25) + signs) * mul
    x = (c ^ d) * mul
    x = x ^ shifted_right(x, 47)
    y = (d ^ x) * mul
    y = y ^ shifted_right(y, 47)
    return y * mul


def shifted_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Zeros come in from the left."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def rotated_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    return shifted_right(bits, count) | (bits << (64 - count))


def unsigned_modulo(bits: torch.Tensor, modulus: torch.Tensor) -> torch.Tensor:
    """For moduli of at most 2^62."""
    # int64 has a sign. Half of the 64 bits fits it, so the remainder is right, and twice it still fits.
    half = shifted_right(bits, 1) % modulus
    return (half * 2 + (bits & 1)) % modulus
