"""What all contexts share: nesting, the device, an orderly end on SIGTERM. Needs torch for CUDA only."""

from __future__ import annotations

import enum
import signal
import threading
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from typing_extensions import Self

from persia.current import current_context, enter_context, leave_context
from persia.embedding.checks import at_least
from persia.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


class Terminated(SystemExit):
    """Raised in the script by SIGTERM. Its sender usually waits a few seconds before it kills."""


def is_stopped(error: BaseException | None) -> bool:
    """Whether a signal has stopped the script."""
    return isinstance(error, (Terminated, KeyboardInterrupt))


def has_failed(error: BaseException | None) -> TypeGuard[BaseException]:
    """Whether the script ends by an error, and not in order; `sys.exit()` is in order."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


class PreprocessMode(enum.Enum):
    """What a context looks embeddings up for."""

    TRAIN = 1  # embedding tensors require gradients
    EVAL = 2  # no gradients, labels are returned
    INFERENCE = 3  # like EVAL, without labels


class BaseCtx:
    """Base of all contexts: `with ...Ctx(...) as ctx:` makes it the current one until it ends.

    Args:
        threadpool_worker_size: accepted for scripts of the published system; the native client sizes itself.
        device_id: CUDA device of the tensors; None: that of the current context, or else the CPU; negative:
            the CPU.
    """

    def __init__(self, threadpool_worker_size: int = 10, device_id: int | None = None) -> None:
        at_least(1, "threadpool_worker_size", threadpool_worker_size)
        self.device_id = checked_device(device_id)
        self._restore_sigterm: Any = None
        self._members: tuple[object, ...] = ()  # found by their class while this context is current

    @property
    def device(self) -> torch.device | None:
        """Where tensors go; None is the CPU."""
        if self.device_id is None:
            return None
        import torch

        return torch.device("cuda", self.device_id)

    @property
    def common_context(self) -> NoReturn:
        """Raises AttributeError, which says where the methods of the published one are."""
        raise AttributeError(
            "there is no common_context: its methods are the context's own, such as ctx.get_embedding_size()"
        )

    def __enter__(self) -> Self:
        enter_context(self, *self._members)
        self._restore_sigterm = _exit_on_sigterm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        leave_context(self)
        if self._restore_sigterm is not None:
            signal.signal(signal.SIGTERM, self._restore_sigterm)
            self._restore_sigterm = None
        return None


def cnt_ctx() -> BaseCtx | None:
    """The current context: the innermost one entered, or None."""
    return current_context(BaseCtx)


def checked_device(device_id: int | None) -> int | None:
    """The device that `device_id` means. InvalidArgumentError: there is no such device."""
    if device_id is None:
        # As published, where a process had one device: `eval_ctx(model=model)` evaluates where training runs.
        outer = cnt_ctx()
        return None if outer is None else outer.device_id
    if device_id < 0:
        return None
    import torch

    check_exists(device_id)
    torch.cuda.set_device(device_id)
    return device_id


def check_exists(device_id: int) -> None:
    """InvalidArgumentError: there is no such CUDA device."""
    import torch

    if not torch.cuda.is_available() or device_id >= torch.cuda.device_count():
        raise InvalidArgumentError(
            f"device_id: {device_id} invalid! {torch.cuda.device_count()} CUDA devices are available; "
            "pass None for the CPU"
        )


def _exit_on_sigterm() -> Any:
    """Lets SIGTERM unwind the script, so that contexts end in order; returns the handler to restore, if
    changed.

    A handler of the script itself is left alone.
    """
    # Python allows handlers to be set on the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return None
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return None
    return signal.signal(signal.SIGTERM, _raise_system_exit)


def _raise_system_exit(number: int, frame: FrameType | None) -> None:
    # A second signal while contexts end kills at once, as the sender expects.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated(128 + number)
