"""The context that is current in this process: the innermost one entered.

Here, below the contexts themselves, because data loaders and optimizers find their context without being
told.
"""

from __future__ import annotations

from typing import Any

__all__ = ["current_context", "enter_context", "leave_context"]

_entered: list[Any] = []


def current_context() -> Any | None:
    """The innermost entered context, or None. `persia.ctx.cnt_ctx` is the typed, public name."""
    return _entered[-1] if _entered else None


def enter_context(context: Any) -> None:
    _entered.append(context)


def leave_context(context: Any) -> None:
    """Removes `context`, wherever it is: contexts held by generators may end out of order."""
    for position in reversed(range(len(_entered))):
        if _entered[position] is context:
            del _entered[position]
            return
