"""persia: a PyTorch-native hybrid trainer for recommendation models that do not fit one machine.

Submodules are loaded when they are first used, so that `import persia`, the servers and `persia-launcher
--help` do not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from persia._version import __version__

if TYPE_CHECKING:
    from persia import ctx, data, embedding, logger, prelude, service, utils

__all__ = ["__version__", "ctx", "data", "embedding", "logger", "prelude", "service", "utils"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return importlib.import_module(f"persia.{name}")
    raise AttributeError(f"module 'persia' has no attribute {name!r}")
