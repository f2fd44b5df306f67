"""What `set_embedding` is given: IDs and rows of a slot, checked before they are written anywhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from persia.config import SlotsConfig
from persia.errors import InvalidArgumentError, InvalidTypeError, NotFoundError

_ROWS_AT_A_TIME = 65_536  # bounds a message


def check_ids(slots: SlotsConfig, name: str, ids: NDArray[np.uint64]) -> None:
    """Checks `ids` uint64 [n] of the slot `name`.

    Raises NotFoundError for an unknown slot, InvalidArgumentError for one with a hash stack, whose IDs share
    rows, and InvalidTypeError for another dtype than uint64.
    """
    slot = slots.slots_config.get(name)
    if slot is None:
        raise NotFoundError(f"there is no slot {name!r}: the slots are {', '.join(slots.slots_config)}")
    if slot.hash_stack is not None:
        raise InvalidArgumentError(
            f"slot {name} has a hash stack: several IDs share a row, which has no single owner to set it"
        )
    if not isinstance(ids, np.ndarray) or ids.dtype != np.uint64 or ids.ndim != 1:
        what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise InvalidTypeError(f"ids of slot {name} are {what}: pass a numpy array of uint64 [n]")


def slot_signs(slots: SlotsConfig, name: str, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The signs uint64 [n] of `ids` uint64 [n] in the slot `name`: `id mod (2^(64-bits) - 1) + prefix`.

    Raises what `check_ids` raises.
    """
    check_ids(slots, name, ids)
    # The modulus is 2^bits - 1 and not 2^bits, as in the native worker: an ID keeps the influence of all its
    # bits, and both must compute the same sign or the rows written here are never found.
    num_id_bits = 64 - slots.feature_index_prefix_bit
    prefix = np.uint64(slots.group_numbers()[name] << num_id_bits)
    signs: NDArray[np.uint64] = ids % np.uint64(2**num_id_bits - 1) + prefix
    return signs


def checked_rows(
    slots: SlotsConfig, name: str, ids: NDArray[np.uint64], rows: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The rows as float32 [n, dim], of `ids` that `check_ids` accepts.

    InvalidArgumentError: another shape.
    """
    dim = slots.slots_config[name].dim
    if not isinstance(rows, np.ndarray) or rows.shape != (len(ids), dim):
        what = list(rows.shape) if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InvalidArgumentError(f"rows of slot {name} are {what}: pass float32 [{len(ids)}, {dim}]")
    # Converted once, so that blocks are views and each is copied into its message only.
    return np.ascontiguousarray(rows, np.float32)


def row_blocks(
    slots: SlotsConfig, name: str, ids: NDArray[np.uint64], rows: NDArray[np.float32]
) -> list[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    """Signs and rows for one message each. Raises what `slot_signs` and `checked_rows` raise."""
    signs, values = slot_signs(slots, name, ids), checked_rows(slots, name, ids, rows)
    blocks = [slice(begin, begin + _ROWS_AT_A_TIME) for begin in range(0, len(signs), _ROWS_AT_A_TIME)]
    return [(signs[block], values[block]) for block in blocks]
