"""Slots in the dense model (`placement: dense`): their rows are parameters of a submodule of it.

So DDP averages their gradients, the dense optimizer trains them, and they are part of each file that the
model is part of: `dense.pt`, TorchScript, exports and packets. Row i is that of ID i.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from persia import _native
from persia.config import SlotsConfig
from persia.errors import ConfigError, FailedPreconditionError, InvalidArgumentError
from persia.pipeline.batch import to_device
from persia.pipeline.dense_ids import DenseIdReader, DenseIds, DenseTable
from persia.pipeline.slot_rows import check_ids, checked_rows
from persia.storage.dense import innermost

if TYPE_CHECKING:
    from persia._native import LookupResult, TrainConfig

MODULE_NAME = "persia_dense_slots"  # of the submodule
_OF_OPTIMIZER = "dense_slots"  # in the file of an optimizer
# States that do not begin as zeros, and the setting that they begin as: of Adagrad and Rprop.
_FIRST_STATES = {"sum": "initial_accumulator_value", "step_size": "lr"}
_IDS_AT_A_TIME = 65535  # samples of a batch


class _Tables(nn.Module):
    """The rows. It has no `forward`: TorchScript keeps its parameters, and the model never calls it."""

    def __init__(self, slots: Mapping[str, DenseTable]) -> None:
        super().__init__()
        self.settings: str = json.dumps({name: asdict(slot) for name, slot in slots.items()})
        self.has_values: bool = False  # True: initial or loaded ones, no longer those of this constructor
        for name, slot in slots.items():
            rows = torch.zeros(slot.cardinality, slot.dim)
            self.register_parameter(_attribute(name), nn.Parameter(rows))

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.has_values = True
        super()._load_from_state_dict(*arguments)


class DenseSlots:
    """The slots in a dense model, which may be TorchScript."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        content = json.loads(str(module.settings))
        self.tables = {name: DenseTable(**table) for name, table in content.items()}
        self.reader = DenseIdReader(self.tables)
        self.is_initial = False  # `begin` has set the rows, and neither a load nor `set_rows` since

    @property
    def has_values(self) -> bool:
        """Whether the rows were given values, here or before: initial, loaded or trained ones."""
        return bool(self._module.has_values)

    @classmethod
    def find(cls, model: nn.Module | None) -> DenseSlots | None:
        """None: the model has none."""
        module = None if model is None else getattr(innermost(model), MODULE_NAME, None)
        return None if module is None else cls(module)

    @classmethod
    def attach(cls, model: nn.Module, slots: SlotsConfig, device: torch.device | None) -> DenseSlots:
        """Adds the rows, zeros, to the model. FailedPreconditionError: it has those of another config."""
        tables = {
            name: DenseTable(slot.cardinality or 0, slot.dim, slot.scaling)
            for name, slot in slots.dense_slots.items()
        }
        found = cls.find(model)
        if found is None and isinstance(innermost(model), torch.jit.ScriptModule):
            raise ConfigError(
                f"slots {', '.join(tables)} are placed in the dense model, and a model of TorchScript takes "
                "no new rows: pass the model that it was compiled from, or choose placement: servers"
            )
        if found is None:
            innermost(model).add_module(MODULE_NAME, _Tables(tables).to(device or "cpu"))
            return cls(getattr(innermost(model), MODULE_NAME))
        if found.tables != tables:
            raise FailedPreconditionError(
                f"the model already has the dense slots {', '.join(found.tables)} of another embedding "
                f"config, and this one places {', '.join(tables) or 'none'} there: make the model anew"
            )
        return found

    def is_part_of(self, model: nn.Module) -> bool:
        """Whether `model` has the module with these rows, such as a wrapper around the user's model."""
        return any(module is self._module for module in model.modules())

    def rows(self, name: str) -> nn.Parameter:
        """[cardinality, dim]"""
        rows: nn.Parameter = getattr(self._module, _attribute(name))
        return rows

    def set_rows(
        self, slots: SlotsConfig, name: str, ids: NDArray[np.uint64], rows: NDArray[np.float32]
    ) -> None:
        """Writes rows [n, dim] of `ids` [n], checked as for servers. No ID may be beyond the slot."""
        check_ids(slots, name, ids)
        self.tables[name].check(name, ids)
        values = checked_rows(slots, name, ids, rows)
        if not np.isfinite(values).all():
            raise InvalidArgumentError(f"rows of slot {name} have NaN or Inf: set finite ones")
        with torch.no_grad():
            self._module.has_values, self.is_initial = True, False
            table = self.rows(name)
            places = torch.from_numpy(ids.astype(np.int64)).to(table.device)
            table[places] = torch.from_numpy(values).to(table)

    def begin(self, slots: SlotsConfig, config: TrainConfig, firsts: Mapping[str, int] | None = None) -> None:
        """Sets rows to the initial values that servers with this config would give them.

        `firsts`: the slots and the first row of each; None: all.
        """
        self._module.has_values, self.is_initial = True, firsts is None
        client = _native.EmbeddedClient(
            slots=slots.native_slots(),
            feature_index_prefix_bit=slots.feature_index_prefix_bit,
            capacity=_IDS_AT_A_TIME,  # a block is copied before the next one evicts it
            num_internal_shards=1,
        )
        client.configure(config)

        def look_up(message: bytes) -> LookupResult:
            result = client.lookup_direct(0, message, requires_grad=True)
            client.release(result.reference)
            return result

        for name, first in (firsts or dict.fromkeys(self.tables, 0)).items():
            for block, found in self._looked_up(name, look_up, first):
                block.copy_(found)

    def copy_from(self, names: Sequence[str], look_up: Callable[[bytes], LookupResult]) -> None:
        """Takes over the rows of these slots as `look_up` of ID features finds them.

        IDs without a row keep what they have: they are found as zeros, from which many models learn nothing.
        """
        for name in names:
            for block, found in self._looked_up(name, look_up):
                block.copy_(torch.where(found.any(dim=1, keepdim=True), found, block))

    def _looked_up(
        self, name: str, look_up: Callable[[bytes], LookupResult], first: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(a block of the rows from `first` on, what is found for it)."""
        rows = self.rows(name).detach()
        for begin in range(first, len(rows), _IDS_AT_A_TIME):
            block = rows[begin : begin + _IDS_AT_A_TIME]
            ids = np.arange(begin, begin + len(block), dtype=np.uint64)
            offsets = np.arange(len(ids) + 1, dtype=np.uint32)
            message = _native.encode_id_features(len(ids), [(name, ids, offsets)])
            # Copied: the result's memory ends with it.
            yield block, torch.from_numpy(np.array(look_up(message).slots[0].rows)).to(block)

    def fill(
        self, names: Sequence[str], ids: Mapping[str, DenseIds], embeddings: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """`embeddings` of the slots `names`, with those of the slots in `ids` looked up here."""
        return [
            self._embed(name, ids[name]) if name in ids else embedding
            for name, embedding in zip(names, embeddings, strict=True)
        ]

    def _embed(self, name: str, ids: DenseIds) -> torch.Tensor:
        rows = self.rows(name)
        places, offsets, weights, factors = (
            None if part is None else to_device(part, rows.device) for part in ids
        )
        assert places is not None, "only weights and factors may be None"
        sums = nn.functional.embedding_bag(
            *(places, rows, offsets),
            mode="sum",
            include_last_offset=True,
            per_sample_weights=None if weights is None else weights.to(rows.dtype),
        )
        return sums if factors is None else sums * factors

    def train_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds the rows to the first group of the optimizer, behind the parameters that it has there.

        Not to a group of their own: a schedule of rates that exists already would not know it.
        """
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        new = [self.rows(name) for name in self.tables if id(self.rows(name)) not in known]
        # Such as ZeroRedundancyOptimizer, whose ranks divide the parameters when they are added to it.
        if new and type(optimizer).add_param_group is not torch.optim.Optimizer.add_param_group:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps lists of parameters of its own, and would not train slots "
                f"in the dense model ({', '.join(self.tables)}): choose placement: servers for them, or "
                "another dense optimizer"
            )
        group = optimizer.param_groups[0]
        for parameter in new:
            group["params"].append(parameter)
            if isinstance(optimizer, torch.optim.Adagrad):  # the only one that makes states when it is made
                total = torch.full_like(parameter, group["initial_accumulator_value"])
                optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": total}


class DenseSlotsOptimizer:
    """The state of an optimizer with that of dense slots apart, by slot: slots may move."""

    def __init__(self, optimizer: torch.optim.Optimizer, slots: DenseSlots) -> None:
        self._optimizer = optimizer
        self._rows = {name: slots.rows(name) for name in slots.tables}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, as it would be without dense slots, and one more key."""
        state = self._optimizer.state_dict()
        groups: list[dict[str, Any]] = []
        states: dict[str, Any] = {}
        settings: dict[str, Any] = {}  # of groups that have only dense slots
        for names, group in zip(self._names(), state["param_groups"], strict=True):
            numbers = dict(zip(group["params"], names, strict=True))
            slots = {name: number for number, name in numbers.items() if name is not None}
            states |= {name: state["state"].pop(k) for name, k in slots.items() if k in state["state"]}
            others = {**group, "params": [number for number, name in numbers.items() if name is None]}
            if slots and not others["params"]:
                settings |= dict.fromkeys(slots, others)
            else:
                groups.append(others)
        cardinalities = {name: len(rows) for name, rows in self._rows.items()}
        own = {"states": states, "settings": settings, "cardinalities": cardinalities}
        return {**state, "param_groups": groups, _OF_OPTIMIZER: own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A slot without a state in `state` keeps its own, which has begun anew when it moves at load."""
        current = self.state_dict()[_OF_OPTIMIZER]
        saved = state.get(_OF_OPTIMIZER, {"states": {}, "settings": {}, "cardinalities": {}})
        groups, others = [], list(state["param_groups"])
        for names in self._names():
            slots = [name for name in names if name is not None]
            if slots and len(slots) == len(names):
                settings = {**current["settings"], **saved["settings"]}
                groups.append({**settings[slots[0]], "params": slots})
            elif others:  # torch names a number of groups or parameters that differs
                group = others.pop(0)
                groups.append({**group, "params": _inserted(group["params"], names)})
        states = {**current["states"], **saved["states"]}
        cardinalities = {**current["cardinalities"], **saved["cardinalities"]}
        known = {
            name: {
                key: self._grown(name, key, value, cardinalities[name]) for key, value in states[name].items()
            }
            for name in self._rows
            if name in states
        }
        self._optimizer.load_state_dict(
            {"state": {**state["state"], **known}, "param_groups": [*groups, *others]}
        )

    def _grown(self, name: str, key: str, value: Any, cardinality: int) -> Any:
        """A state of so many rows, or of none, with what begins for rows that the slot has got since."""
        num_rows = len(self._rows[name])
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != cardinality:
            return value
        begin = 0.0
        if setting := _FIRST_STATES.get(key):  # else Rprop would never train them
            groups = zip(self._names(), self._optimizer.param_groups, strict=True)
            begin = next(group.get(setting, 0.0) for names, group in groups if name in names)
        return torch.cat([value, value.new_full((num_rows - cardinality, *value.shape[1:]), begin)])

    def _names(self) -> list[list[str | None]]:
        """Of each parameter of each group: its slot."""
        # By identity: a script may have made the optimizer of a model that had its rows already.
        slots = {id(rows): name for name, rows in self._rows.items()}
        return [[slots.get(id(p)) for p in group["params"]] for group in self._optimizer.param_groups]


def _inserted(numbers: Sequence[int], names: Sequence[str | None]) -> list[int | str]:
    """The parameters of a group with the slots where they are. Only the order counts to torch."""
    found: list[int | str] = list(numbers)
    for place, name in enumerate(names):
        if name is not None:
            found.insert(place, name)
    return found


class DenseMoves:
    """The slots that a load moves between the dense model and the servers, and those that have grown."""

    def __init__(self, slots: DenseSlots | None) -> None:
        self._slots = slots
        self.from_servers: list[str] = []
        self.without_values: dict[str, int] = {}  # by slot the first row that the file does not have
        self._saved: dict[str, torch.Tensor] = {}  # rows of the file that the model lacks, by parameter

    def adapt(self, state: dict[str, Any]) -> dict[str, Any]:
        """A saved state of the model, made one of this model. ConfigError: a slot has fewer rows now."""
        own: dict[str, tuple[str, torch.Tensor]] = {}
        if self._slots is not None:
            own = {_key(name): (name, self._slots.rows(name).detach()) for name in self._slots.tables}
            self._slots.is_initial = False
        saved = {key for key in state if key.startswith(f"{MODULE_NAME}.")}
        self._saved = {key: state[key] for key in saved - own.keys()}
        self.from_servers = [name for key, (name, _) in own.items() if key not in saved]
        kept = {key: value for key, value in state.items() if key not in self._saved}
        for key, (name, rows) in own.items():
            found = state.get(key, rows[:0])
            if found.shape[1] != rows.shape[1] or len(found) > len(rows):
                raise ConfigError(
                    f"slot {name!r} has cardinality {len(found)} and dim {found.shape[1]} in the checkpoint, "
                    f"and {len(rows)} and {rows.shape[1]} in the embedding config: a slot in the dense model "
                    "keeps its dim and can only grow"
                )
            if len(found) < len(rows):
                self.without_values[name] = len(found)
                kept[key] = torch.cat([found, rows[len(found) :].to(found)])
        return kept

    def __bool__(self) -> bool:
        return bool(self._saved or self.from_servers)

    def to_servers(self, slots: SlotsConfig) -> dict[str, NDArray[np.float32]]:
        """Rows by slot. A slot that the job no longer has is left out."""
        return {
            name: self._saved[_key(name)].float().cpu().numpy()
            for name in slots.slots_config
            if _key(name) in self._saved
        }


def _attribute(name: str) -> str:
    """A name of Python, which TorchScript wants; different for different slots."""
    return "slot_" + re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):x}_", name)


def _key(name: str) -> str:
    return f"{MODULE_NAME}.{_attribute(name)}"
