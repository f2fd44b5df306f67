"""From a slot's IDs to the signs that name its rows, as embedding workers compute them, for whole arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from persia.config import SlotsConfig
from persia.errors import InvalidArgumentError, InvalidTypeError, NotFoundError

__all__ = ["slot_signs"]


def slot_signs(slots: SlotsConfig, name: str, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The signs uint64 [n] of `ids` uint64 [n] in the slot `name`: `id mod (2^(64-bits) - 1) + prefix`.

    Raises NotFoundError for a slot that is none, InvalidArgumentError for one with a hash stack, whose IDs
    share rows, and InvalidTypeError for another dtype than uint64.
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
    num_id_bits = 64 - slots.feature_index_prefix_bit
    prefix = np.uint64(slots.group_numbers()[name] << num_id_bits)
    signs: NDArray[np.uint64] = ids % np.uint64(2**num_id_bits - 1) + prefix
    return signs
