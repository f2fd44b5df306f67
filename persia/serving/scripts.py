"""TorchScript of a checkpoint or packet. It is code: its author acts with the rights of this process."""

from __future__ import annotations

import io
import os
import warnings

import torch

from persia import env
from persia.checkpoint.checkpoints import Source
from persia.errors import CorruptionError, StorageError, UntrustedError
from persia.storage.location import Location
from persia.storage.signing import trusted_keys

JIT_DENSE_NAME = "jit_dense.pt"
_WRITABLE_BY_ALL = 0o002


def load_script(source: Source, name: str = JIT_DENSE_NAME) -> torch.nn.Module:
    """The TorchScript `name` of the checkpoint `source`.

    Raises NotFoundError, which says how to write one, CorruptionError, or UntrustedError: see `read_own`.
    """
    try:
        content = source.dense(name, read_own)
    # The most frequent reason is a checkpoint of training alone, which has weights and no TorchScript.
    except LookupError as failure:
        raise type(failure)(
            f"{failure}; write it with ctx.dump_checkpoint(..., with_jit_model=True)"
        ) from failure
    return read_script(content, str(source.location / name))


def read_own(path: Location, *, max_bytes: int) -> bytes:
    """A file of TorchScript. UntrustedError: it is unsigned, and of another user than this process.

    Where signatures are checked, the caller compares it with a signed manifest, whoever owns it. A storage
    service has no owners: who may write there is decided there.
    """
    if not path.is_local or env.trusts_scripts() or trusted_keys() is not None:
        return path.read(max_bytes=max_bytes)
    num_bytes = min(path.size(), max_bytes)
    try:
        with open(path.path, "rb") as file:
            # Of the opened file: another one may take its name meanwhile.
            status = os.fstat(file.fileno())
            if status.st_uid in (os.geteuid(), 0) and not status.st_mode & _WRITABLE_BY_ALL:
                return file.read(num_bytes)
    except OSError as failure:
        raise StorageError(f"{path} could not be read: {failure}") from failure
    raise UntrustedError(
        f"{path} is code, is not signed, and user {status.st_uid} may have written it (mode "
        f"{status.st_mode & 0o777:o}), not the user {os.geteuid()} of this process: sign checkpoints and "
        "give --verify-key (PERSIA_VERIFY_KEY), or run it all the same with --trust-scripts "
        "(PERSIA_TRUST_SCRIPTS=1)"
    )


def read_script(content: bytes, where: str) -> torch.nn.Module:
    """TorchScript that `torch.jit.save` wrote. CorruptionError names `where`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's: see persia.storage.dense
            model: torch.nn.Module = torch.jit.load(io.BytesIO(content), map_location="cpu")  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError, EOFError) as failure:
        raise CorruptionError(f"{where} is no TorchScript: {failure}") from failure
    return model
