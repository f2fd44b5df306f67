"""The context that is current: the innermost one entered by this thread, or else by the process.

Below the contexts themselves, because data loaders and optimizers find their context without being told.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

T = TypeVar("T")

# (thread, the context and its members, as its runtime), in the order in which contexts were entered
_entered: list[tuple[int, tuple[Any, ...]]] = []


def current_context(kind: type[T]) -> T | None:
    """The innermost entered context that is a `kind`, or its member that is; None without one.

    `persia.ctx.cnt_ctx` is the public name. A thread that has entered none sees that of the process; where
    several threads have, there is none, as one of them would be taken by chance.
    """
    # A thread that has entered a context means that one, whatever other threads train.
    own = own_context(kind)
    if own is not None:
        return own
    found = [(thread, member) for thread, members in tuple(_entered) for member in _of_kind(members, kind)]
    return found[-1][1] if len({thread for thread, _ in found}) == 1 else None


def own_context(kind: type[T]) -> T | None:
    """The same, of the contexts that this thread has entered."""
    # Copied, here and above: another thread may enter or leave a context at any moment.
    own = [members for thread, members in tuple(_entered) if thread == threading.get_ident()]
    return next((member for members in reversed(own) for member in _of_kind(members, kind)), None)


def enter_context(context: Any, *members: Any) -> None:
    """Makes the context current, which may be found by the class of one of its `members`, too."""
    _entered.append((threading.get_ident(), (context, *members)))


def leave_context(context: Any) -> None:
    """Removes `context`, wherever it is: contexts held by generators may end out of order."""
    for position in reversed(range(len(_entered))):
        if _entered[position][1][0] is context:
            del _entered[position]
            return


def _of_kind(members: tuple[Any, ...], kind: type[T]) -> list[T]:
    return [member for member in members if isinstance(member, kind)][:1]
