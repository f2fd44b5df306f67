"""Ed25519 signatures of the documents that commit a checkpoint or a packet.

Whoever writes them has a private key (`PERSIA_SIGN_KEY`), whoever reads them the public one
(`PERSIA_VERIFY_KEY`). A manifest holds a SHA-256 of every file, so its signature covers all of them. The key
files are read at each use: a process takes a new one without a restart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia import env
from persia.errors import ConfigError, FailedPreconditionError, StorageError, UntrustedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# Says what is signed, so that a signature of this key over anything else is none over a manifest.
_PURPOSE = b"persia manifest 1\n"
_ENDING = re.compile(rb',\n "signed_by": "ed25519:([0-9a-f]{64}):([0-9a-f]{128})"')
_ENDING_BYTES = len(',\n "signed_by": "ed25519::"') + 64 + 128
_MAX_KEY_BYTES = 64 << 10


@dataclass(frozen=True)
class TrustedKeys:
    """Public keys by their 32 bytes in hex, each with the file that it is from."""

    files: dict[str, str]

    def verify(self, body: bytes, what: str) -> None:
        """`body` is a document up to its checksum. UntrustedError names `what`: no key signed it."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        keys = " or ".join(f"{file} ({key[:16]})" for key, file in self.files.items())
        ending = _ENDING.fullmatch(body, max(len(body) - _ENDING_BYTES, 0))
        if ending is None:
            raise UntrustedError(
                f"{what} is not signed, and must be by {keys}: write it with --sign-key (PERSIA_SIGN_KEY)"
            )
        key, signature = ending[1].decode(), bytes.fromhex(ending[2].decode())
        if key not in self.files:
            raise UntrustedError(
                f"{what} is signed by the key {key[:16]}, and must be by {keys}: use a checkpoint or packet "
                "of your own, or add that public key to PERSIA_VERIFY_KEY if you know whose it is"
            )
        try:
            signed = body[: len(body) - _ENDING_BYTES]
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, _PURPOSE + signed)
        except InvalidSignature:
            raise UntrustedError(
                f"{what} was changed after {keys} signed it: use another checkpoint or packet"
            ) from None


@dataclass(frozen=True)
class Signer:
    """A private key."""

    key: Ed25519PrivateKey
    file: str

    @property
    def public_hex(self) -> str:
        return self.key.public_key().public_bytes_raw().hex()

    @property
    def keys(self) -> TrustedKeys:
        """The public half, to judge what is there already."""
        return TrustedKeys({self.public_hex: self.file})

    def ending(self, body: bytes) -> bytes:
        """What follows `body`, a document without its last brace."""
        signature = self.key.sign(_PURPOSE + body).hex()
        return f',\n "signed_by": "ed25519:{self.public_hex}:{signature}"'.encode()


def signer() -> Signer | None:
    """The key of `PERSIA_SIGN_KEY`; None: what this process writes is not signed. ConfigError."""
    path = env.get_sign_key()
    if path is None:
        return None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = _read_key("PERSIA_SIGN_KEY", path)
    if os.stat(path).st_mode & 0o007:
        raise ConfigError(f"PERSIA_SIGN_KEY={path} is open to every user of this machine: chmod 600 {path}")
    try:
        key: Any = load_pem_private_key(content, password=None)
    except (ValueError, TypeError) as failure:
        raise _no_key("PERSIA_SIGN_KEY", path, "private", failure) from failure
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key("PERSIA_SIGN_KEY", path, "private", type(key).__name__)
    return Signer(key, path)


def trusted_keys() -> TrustedKeys | None:
    """The keys of `PERSIA_VERIFY_KEY`; None: signatures are not checked. ConfigError."""
    paths = env.get_verify_keys()
    if not paths:
        return None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    files: dict[str, str] = {}
    for path in paths:
        try:
            key = load_pem_public_key(_read_key("PERSIA_VERIFY_KEY", path))
        except ValueError as failure:
            raise _no_key("PERSIA_VERIFY_KEY", path, "public", failure) from failure
        if not isinstance(key, Ed25519PublicKey):
            raise _no_key("PERSIA_VERIFY_KEY", path, "public", type(key).__name__)
        files[key.public_bytes_raw().hex()] = path
    return TrustedKeys(files)


def create_key(path: Path) -> Sequence[Path]:
    """Writes a new private key to `path`, for its owner alone, and the public one beside it as `path`.pub.

    FailedPreconditionError: one of the files exists; what it has signed could not be verified any more.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    files = path, path.with_name(f"{path.name}.pub")
    if existing := [str(file) for file in files if file.exists()]:
        raise FailedPreconditionError(f"{existing[0]} exists: give another path, or move it away")
    try:
        for file, content, mode in ((files[0], private, 0o600), (files[1], public, 0o644)):
            # Never readable by others, not even before a chmod; O_EXCL: it follows no link.
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(handle, "wb") as opened:
                opened.write(content)
    except OSError as failure:
        raise StorageError(f"{file} could not be written: {failure}") from failure
    return files


def _read_key(variable: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_KEY_BYTES)
    except OSError as failure:
        raise ConfigError(
            f"{variable}={path} cannot be read: {failure.strerror}; persia-launcher signing-key create "
            "makes a pair of keys"
        ) from failure


def _no_key(variable: str, path: str, kind: str, found: object) -> ConfigError:
    return ConfigError(
        f"{variable}={path} is no {kind} Ed25519 key in PEM ({found}): give one that persia-launcher "
        "signing-key create wrote"
    )
