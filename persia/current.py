"""The context that is current: the innermost one entered by this thread, or else by the process.

Here, below the contexts themselves, because data loaders and optimizers find their context without being
told.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["current_context", "enter_context", "leave_context", "own_context"]

_entered: list[tuple[int, Any]] = []  # (thread, context), in the order in which they were entered


def current_context(kind: type = object) -> Any | None:
    """The innermost entered context that is a `kind`, or None. `persia.ctx.cnt_ctx` is the public name.

    A thread that has entered none sees that of the process; where several threads have, there is none, as
    one of them would be taken by chance.
    """
    own = own_context(kind)
    if own is not None:
        return own
    entered = [(thread, context) for thread, context in tuple(_entered) if isinstance(context, kind)]
    return entered[-1][1] if len({thread for thread, _ in entered}) == 1 else None


def own_context(kind: type = object) -> Any | None:
    """The innermost context of a `kind` that this thread has entered, or None."""
    own = [context for thread, context in tuple(_entered) if thread == threading.get_ident()]
    return next((context for context in reversed(own) if isinstance(context, kind)), None)


def enter_context(context: Any) -> None:
    _entered.append((threading.get_ident(), context))


def leave_context(context: Any) -> None:
    """Removes `context`, wherever it is: contexts held by generators may end out of order."""
    for position in reversed(range(len(_entered))):
        if _entered[position][1] is context:
            del _entered[position]
            return
