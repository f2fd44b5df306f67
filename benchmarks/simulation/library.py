"""native/simulation by ctypes: the native half of the simulation."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from persia import errors

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = _ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
PATH = _FOLDER / "simulation" / "libpersia_simulation.so"
_MAX_TEXT = 2048

_P, _I32, _U32, _I64, _U64 = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_int64,
    ctypes.c_uint64,
)
_S, _D = ctypes.c_char_p, ctypes.c_double
# By name: result, arguments. As in native/simulation/cluster.cc and rows.cc.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "reset": (None, [_U64]),
    "clock": (_P, []),
    "next": (_P, []),
    "run": (_I64, [_I64, _U64]),
    "take_ended": (_I64, [_P, _P, _S, _I64]),
    "process": (_I32, [_I32]),
    "freeze": (None, [_I32, _I32]),
    "kill": (None, [_I32]),
    "cut": (None, [_I32, _I32, _I32]),
    "listens": (_I32, [_S]),
    "weather": (None, [_I64, _D, _D]),
    "violation": (_S, []),
    "server": (_P, [_I32, _U32, _U32, _I64, _I32]),
    "server_incarnation": (_U64, [_P]),
    "server_state": (_I32, [_P]),
    "server_serves": (_I32, [_P]),
    "server_is_copying": (_I32, [_P]),
    "log_state": (_I32, [_P]),
    "log_has_copy": (_I32, [_P]),
    "log_silent_for": (_D, [_P]),
    "server_count": (_U64, [_P, _S]),
    "server_start": (_I64, [_I32, _P, _S]),
    "server_stop": (_I64, [_I32, _P]),
    "server_attach": (_I64, [_I32, _P, _S, _U64]),
    "server_release": (_I64, [_I32, _P]),
    "server_fence": (_I64, [_I32, _P, _S]),
    "log_follow": (_I64, [_I32, _P, _U64]),
    "log_take_over": (_I64, [_I32, _P, _I32]),
    "log_renounce": (_I64, [_I32, _P]),
    "server_digest": (_I64, [_I32, _P]),
    "worker": (_P, [_I32, _U32, _U64]),
    "worker_incarnation": (_U64, [_P]),
    "worker_count": (_U64, [_P, _S]),
    "worker_release_waiting": (_I64, [_I32, _P]),
    "worker_set_server": (None, [_P, _U32, _S]),
    "worker_start": (_I64, [_I32, _P, _S]),
    "worker_register": (_I64, [_I32, _P, _U32, _S, _I64]),
    "id_features": (_I64, [_U32, _S, _I64]),
    "client": (_P, [_I32, _U32]),
    "client_worker": (_I64, [_I32, _P, _U32, _I32, _S]),
    "client_configure": (_I64, [_I32, _P, _D]),
    "client_lookup": (_I64, [_I32, _P, _U32, _U64, _U64, _D]),
    "client_lookup_direct": (_I64, [_I32, _P, _U32, _S, _I64, _U32, _U64, _U64, _D]),
    "batch": (None, [_P, _P, _P, _P]),
    "client_return": (_I64, [_I32, _P, _P, _U32, _U64, _U64, _D]),
    "client_count_rows": (_I64, [_I32, _P, _D]),
    "client_release": (_I64, [_I32, _P, _U32, _U64, _U64, _D]),
    "free": (None, [_P]),
    "snapshot": (_I64, [_I32, _P, _U32, _U32, _U32]),
    "snapshot_num_rows": (_U64, [_P]),
    "snapshot_step": (_U64, [_P]),
    "snapshot_config": (_I64, [_P]),
    "snapshot_part_rows": (_U64, [_P, _U32]),
    "snapshot_read": (_I64, [_I32, _P, _U32, _U64]),
    "snapshot_close": (_I64, [_I32, _P]),
    "loader": (_I64, [_I32, _P, _S, _I64, _I32, _I32, _U32, _U32]),
    "loader_num_rows": (_U64, [_P]),
    "loader_num_evicted": (_U64, [_P]),
    "loader_chunk": (_I64, [_I32, _P, _S, _I64, _I32]),
    "loader_replace": (_I64, [_I32, _P]),
    "loader_commit": (_I64, [_I32, _P]),
    "loader_end": (_I64, [_I32, _P]),
}

# By the number of persia::StatusCode.
_ERRORS = (
    errors.PersiaError,
    errors.InvalidArgumentError,
    errors.NotFoundError,
    errors.CorruptionError,
    errors.UnavailableError,
    errors.DeadlineExceededError,
    errors.ResourceExhaustedError,
    errors.StorageError,
    errors.InternalError,
    errors.FailedPreconditionError,
    errors.PermissionDeniedError,
)


def error_of(code: int) -> type[errors.PersiaError]:
    return _ERRORS[code]


class Library:
    """The functions of the library, by their names without `sim_`."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(str(PATH))  # it never calls Python, and is quick: the GIL stays
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"sim_{name}")
            function.restype, function.argtypes = result, arguments
            if name not in ("clock", "next", "reset", "take_ended"):
                setattr(self, name, function)
        self._library = library
        self._code, self._number = _I32(), _I64()
        self._text = ctypes.create_string_buffer(_MAX_TEXT)
        self._ended = (ctypes.byref(self._code), ctypes.byref(self._number), self._text, _MAX_TEXT)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def reset(self, seed: int) -> None:
        self._library.sim_reset(seed)
        # Read more often than anything is called.
        self.clock = _I64.from_address(self._library.sim_clock())
        self.next = _I64.from_address(self._library.sim_next())

    def take_ended(self) -> tuple[int, tuple[int, int, str]]:
        """A call that has ended: its number; status code, result and text."""
        call = self._library.sim_take_ended(*self._ended)
        text = self._text.value.decode(errors="replace")
        return call, (self._code.value, self._number.value, text)
