"""Libraries that persia uses where they are installed, and does not install with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from persia.errors import FailedPreconditionError


@contextlib.contextmanager
def needs(what: str, install: str) -> Iterator[None]:
    """Around the import of such a library. Raises FailedPreconditionError, which says what to install.

    `what` begins the message, as "the format onnx needs onnx"; `install` is what `pip install` takes.
    """
    try:
        yield
    except ImportError as error:
        raise FailedPreconditionError(f"{what} ({error}): pip install {install}") from error
