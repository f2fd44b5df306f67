"""The features of a job in plain torch: what its embedding workers do, over tables of the exported rows.

`ExportedFeatures` pools IDs as the workers do, and `ExportedJob` puts the dense model behind it. The rules of
exported.py hold here, too: nothing knows the store, TorchScript compiles it, and no shape depends on values.
"""

# A forward that returns what a model returns has no annotation, and TorchScript reads comments of types.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from persia.nn.exported import (
    ExportedSlot,
    KeyedRows,
    bag_of_each,
    fold,
    sign_hash,
    unsigned_modulo,
)


@dataclass(frozen=True)
class ExportedFeature:
    """An ID feature of the model."""

    slot: ExportedSlot
    mean_scaling: bool = False
    num_fixed: int = 0  # IDs that a sample of a raw slot keeps; 0: the rows are pooled


class ExportedFeatures(nn.Module):
    """Embeddings of ID features. In bits they equal those of the embedding workers.

    Args:
        tables: by dim, with the signs of that dim's slots as keys.
        features: in the order of the inputs and outputs.
        prefix_bits: how many of a sign's bits are the prefix.
    """

    def __init__(
        self, tables: dict[int, KeyedRows], features: Sequence[ExportedFeature], prefix_bits: int
    ) -> None:
        super().__init__()
        dims = sorted(tables)
        slots = [feature.slot for feature in features]
        self.tables = nn.ModuleList([tables[dim] for dim in dims])
        self.table_of = [dims.index(slot.dim) for slot in slots]
        self.id_bits = 64 - prefix_bits
        self.prefixes = [slot.prefix for slot in slots]
        self.rounds = [slot.rounds for slot in slots]
        self.sizes = [slot.size for slot in slots]
        self.num_fixed = [feature.num_fixed for feature in features]
        self.is_sqrt = [slot.sqrt_scaling for slot in slots]
        self.is_mean = [feature.mean_scaling for feature in features]

    def forward(
        self,
        ids: list[torch.Tensor],
        lengths: list[torch.Tensor],
        weights: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """For each feature float32 [batch, dim], or of a raw slot [batch, num_fixed, dim + 1].

        Args:
            ids: int64 [n] for each feature; uint64 IDs as int64 of the same bits.
            lengths: int64 [batch] for each, how many IDs each sample has.
            weights: float32 [n] for each; those of raw slots are ignored. None: all are 1.
        """
        found: list[torch.Tensor] = [torch.empty(0) for _ in ids]
        for number, table in enumerate(self.tables):
            for place in range(len(self.table_of)):
                if self.table_of[place] == number and self.num_fixed[place] > 0:
                    kept, is_kept = self._kept(ids[place], lengths[place], self.num_fixed[place])
                    rows = table(self._signs(kept, place))
                    found[place] = self._raw(rows, is_kept, place)
                elif self.table_of[place] == number:
                    weight = None if weights is None else weights[place]
                    rows = table(self._signs(ids[place], place))
                    found[place] = self._pooled(rows, lengths[place], weight, place)
        return found

    def _signs(self, ids: torch.Tensor, place: int) -> torch.Tensor:
        """int64 [n * rounds], at least [n]: those of an ID one after the other."""
        if self.rounds[place] == 0:
            return fold(ids, self.id_bits) + self.prefixes[place]
        columns: list[torch.Tensor] = []
        hashed = ids
        size = torch.full_like(ids, self.sizes[place])
        for number in range(self.rounds[place]):
            hashed = sign_hash(hashed)
            columns.append(unsigned_modulo(hashed, size) + number * size + self.prefixes[place])
        return torch.stack(columns, dim=1).reshape(-1)

    def _pooled(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        weight: torch.Tensor | None,
        place: int,
    ) -> torch.Tensor:
        """float32 [batch, dim]"""
        each = max(self.rounds[place], 1)
        batch, total = lengths.shape[0], rows.shape[0] // each
        bags = bag_of_each(lengths.cumsum(0) - lengths, total)
        bags_of_rows = bags
        if each > 1:
            bags_of_rows = bags.unsqueeze(1).expand(-1, each).reshape(-1)
        if weight is not None:
            of_rows = weight.unsqueeze(1).expand(-1, each).reshape(-1)
            rows = rows * of_rows.unsqueeze(1)
        sums = rows.new_zeros(batch, rows.shape[1]).index_add(0, bags_of_rows, rows)
        is_sqrt = self.is_sqrt[place]
        if not (is_sqrt or self.is_mean[place]):
            return sums
        if weight is None:
            divisor = (lengths * each if is_sqrt else lengths).clamp(min=1).to(torch.float32)
            factor = 1.0 / (divisor.sqrt() if is_sqrt else divisor)
        else:
            # In float64, as the workers do: the rounding of many weights must not add up.
            terms = weight.to(torch.float64)
            total_weight = torch.zeros(batch, dtype=torch.float64, device=rows.device).index_add(
                0, bags, terms * terms if is_sqrt else terms
            )
            if is_sqrt:
                divisor = (total_weight * each).to(torch.float32).sqrt()
            else:
                divisor = total_weight.to(torch.float32)
            factor = torch.where(divisor == 0, torch.zeros_like(divisor), 1.0 / divisor)
        return sums * factor.unsqueeze(1)

    def _kept(
        self, ids: torch.Tensor, lengths: torch.Tensor, num_fixed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first IDs of each sample: int64 [batch * num_fixed], and where they are IDs, bool
        [batch, num_fixed].
        """
        columns = torch.arange(num_fixed, device=ids.device).unsqueeze(0)
        is_kept = columns < lengths.unsqueeze(1)
        places = (lengths.cumsum(0) - lengths).unsqueeze(1) + columns
        # One more ID stands for those that short samples lack.
        padded = torch.cat([ids, ids.new_zeros(1)])
        places = torch.where(is_kept, places, torch.full_like(places, ids.shape[0]))
        return padded[places.reshape(-1)], is_kept

    def _raw(self, rows: torch.Tensor, is_kept: torch.Tensor, place: int) -> torch.Tensor:
        """float32 [batch, num_fixed, dim + 1]; the last channel is 1 where there is an ID."""
        each, dim = self.rounds[place], rows.shape[1]
        if each > 1:
            buckets = rows.view(-1, each, dim)
            rows = buckets[:, 0]
            for number in range(1, each):
                rows = rows + buckets[:, number]
            if self.is_sqrt[place]:
                rows = rows * (1.0 / torch.tensor(float(each)).sqrt())
        batch, num_fixed = is_kept.shape[0], is_kept.shape[1]
        mask = is_kept.to(rows.dtype).unsqueeze(2)
        rows = rows.reshape(batch, num_fixed, dim)
        return torch.cat([torch.where(is_kept.unsqueeze(2), rows, torch.zeros_like(rows)), mask], dim=2)


class ByPosition(nn.Module):
    """Calls a dense model with lists."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]):
        """What the model returns."""
        return self.model(dense, embeddings)


class ByName(nn.Module):
    """Calls a dense model with dicts."""

    def __init__(self, model: nn.Module, dense: Sequence[str], ids: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.dense_names = list(dense)
        self.id_names = list(ids)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]):
        """What the model returns."""
        dense_by_name: dict[str, torch.Tensor] = {}
        for place in range(len(self.dense_names)):
            dense_by_name[self.dense_names[place]] = dense[place]
        rows_by_name: dict[str, torch.Tensor] = {}
        for place in range(len(self.id_names)):
            rows_by_name[self.id_names[place]] = embeddings[place]
        return self.model(dense_by_name, rows_by_name)


class ExportedJob(nn.Module):
    """Predictions of a job as one plain module. Tensors are in the order of the checkpoint's signature."""

    def __init__(self, features: ExportedFeatures, model: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.model = model

    def forward(
        self,
        dense: list[torch.Tensor],
        ids: list[torch.Tensor],
        lengths: list[torch.Tensor],
        weights: list[torch.Tensor] | None = None,
    ):
        """What the dense model returns for `dense`, [batch, ...] each, and IDs as in `ExportedFeatures`."""
        return self.model(dense, self.features(ids, lengths, weights))
