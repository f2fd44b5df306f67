"""The small files that say what counts: manifests, in JSON, and pointers, which name one of them.

Each carries a checksum of its own, as nothing above it could vouch for it: a byte that the storage has
changed may leave good JSON, or the name of another checkpoint. Layouts: docs/checkpoint_format.md,
"Manifest".
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from persia._version import __version__
from persia.errors import CorruptionError
from persia.storage.location import Location
from persia.storage.signing import Signer, TrustedKeys
from persia.validation import Count, json_object, read_document

# Since this version a document must have a checksum.
_VERSION = 2
_ENDING = re.compile(rb',\n "checksum": "([0-9a-f]{64})"\n}\n')
_MAX_POINTER_BYTES = 256
_ENDING_BYTES = len(',\n "checksum": ""\n}\n') + 64


@dataclass(frozen=True)
class _Head:
    version: Count


def encode_document(form: str, values: dict[str, Any], signer: Signer | None = None) -> bytes:
    """JSON of `values` behind a "format" and a "version"; its last keys are the signature, if there is a
    `signer`, and the checksum of all before it.
    """
    body = json.dumps({"format": form, "version": _VERSION, **values}, indent=1).encode()
    # Last, by text and not by key order: the checksum covers exactly the bytes in front of it.
    body = body.removesuffix(b"\n}")
    if signer is not None:
        body += signer.ending(body)
    return body + b',\n "checksum": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def decode_document(content: bytes, what: str, *, form: str) -> dict[str, Any]:
    """Its values. CorruptionError, naming `what`: it is damaged, of another format or of a newer version.

    Version 1 had no checksum, and is read without.
    """
    # Before the checksum: a file of another format deserves a better message than "damaged".
    values: dict[str, Any] = json_object(content, what)
    if values.get("format") != form:
        raise CorruptionError(f"{what} is no manifest of a {form}")
    version = read_document(_Head, values, what).version
    if version > _VERSION:
        raise CorruptionError(
            f"{what} has version {version}, this persia ({__version__}) knows versions up to {_VERSION}: "
            f"use a newer one; {values.get('created_by')!r:.80} wrote it"
        )
    # One damaged byte can make a version 2 a version 1; it cannot take the checksum away as well.
    if version != 1 or "checksum" in values:
        _check(content, what)
    return values


def verify_document(content: bytes, what: str, keys: TrustedKeys | None) -> None:
    """UntrustedError, naming `what`: none of `keys` has signed it. Without keys it returns at once.

    CorruptionError: the checksum does not follow the signature.
    """
    if keys is not None:
        keys.verify(content[: len(content) - _ENDING_BYTES], what)
        # Also of version 1: a key in place of the checksum would replace one that is signed.
        _check(content, what)


def _check(content: bytes, what: str) -> None:
    ending = _ENDING.fullmatch(content, max(len(content) - _ENDING_BYTES, 0))
    body = content[: len(content) - _ENDING_BYTES]
    if ending is None or hashlib.sha256(body).hexdigest().encode() != ending[1]:
        raise CorruptionError(
            f"{what} is damaged: its checksum is not that of its bytes; it was changed after it was written"
        )


def encode_pointer(name: str) -> bytes:
    """`name` in a line, for people and other tools, and its checksum in the next."""
    return f"{name}\n{_sha256(name)}\n".encode()


def read_pointer(pointer: Location) -> str:
    """As `decode_pointer`; NotFoundError: there is no such file."""
    return decode_pointer(pointer.read_replaced(max_bytes=_MAX_POINTER_BYTES), str(pointer))


def decode_pointer(content: bytes, what: str) -> str:
    """The name, for the caller to judge. CorruptionError, naming `what`: its checksum says otherwise.

    A name alone is good, too: people point to what they choose.
    """
    name, _, checksum = content.decode(errors="replace").strip().partition("\n")
    if checksum and checksum != _sha256(name):
        raise CorruptionError(
            f"{what} is damaged: it says {name!r:.80}, and has another checksum; write the name alone "
            "to point to it"
        )
    return name


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
