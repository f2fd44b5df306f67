"""SHA-256 of each page of a file: what a signature says about a file of rows that is read in ranges.

The format's own checksums find damage, and an attacker can make other bytes with the same ones. A signed
manifest therefore has the SHA-256 of a file of digests, one for each page, which lies beside the rows. A
server that needs a part of the rows reads and checks only the pages that hold it.
"""

from __future__ import annotations

import hashlib

from persia.errors import CorruptionError
from persia.storage.location import Location

PAGES_ENDING = ".pages"
# A reader of a few rows reads a page at least. Smaller pages make the digests larger: 32 bytes for 64 KiB are
# a 2,000th of the file.
_PAGE_BYTES = 64 << 10
_DIGEST_BYTES = hashlib.sha256().digest_size


class PageHasher:
    """Takes the bytes of a file in pieces of any size."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._page = hashlib.sha256()
        self._filled = 0

    def update(self, piece: bytes) -> None:
        view = memoryview(piece)
        while len(view):
            part = view[: _PAGE_BYTES - self._filled]
            self._page.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == _PAGE_BYTES:
                self._end_page()

    def finish(self) -> bytes:
        """The digests of all pages; the last page may be short."""
        if self._filled:
            self._end_page()
        return bytes(self._digests)

    def _end_page(self) -> None:
        self._digests += self._page.digest()
        self._page, self._filled = hashlib.sha256(), 0


class PagedFile:
    """A file whose every byte is checked before it is returned."""

    def __init__(self, location: Location, num_bytes: int, digests: bytes) -> None:
        """`digests` are those of `PageHasher`, and to be trusted."""
        self._location, self._num_bytes, self._digests = location, num_bytes, digests

    @classmethod
    def open(cls, location: Location, num_bytes: int, checksum: str) -> PagedFile:
        """Reads the digests beside `location`. CorruptionError: their SHA-256 is not `checksum`."""
        path = location.parent / f"{location.name}{PAGES_ENDING}"
        expected = -(-num_bytes // _PAGE_BYTES) * _DIGEST_BYTES
        # Its size is checked before it is read: a replaced file must not fill the memory.
        digests = path.read(max_bytes=expected) if path.size() == expected else b""
        if hashlib.sha256(digests).hexdigest() != checksum:
            raise CorruptionError(f"{path} is damaged or replaced: its checksum is not the manifest's")
        return cls(location, num_bytes, digests)

    def read_range(self, start: int, length: int) -> bytes:
        """As `Location.read_range`. CorruptionError: other bytes than those that were written."""
        # Whole pages, as a digest says nothing of a part of one.
        first = start // _PAGE_BYTES * _PAGE_BYTES
        end = min(-(-(start + length) // _PAGE_BYTES) * _PAGE_BYTES, self._num_bytes)
        content = memoryview(self._location.read_range(first, end - first))
        for offset in range(0, end - first, _PAGE_BYTES):
            at = (first + offset) // _PAGE_BYTES * _DIGEST_BYTES
            digest = hashlib.sha256(content[offset : offset + _PAGE_BYTES]).digest()
            if digest != self._digests[at : at + _DIGEST_BYTES]:
                raise CorruptionError(
                    f"{self._location}, bytes {first + offset} to {min(first + offset + _PAGE_BYTES, end)}: "
                    "they are not those that were signed: the file was damaged or replaced"
                )
        return bytes(content[start - first : start - first + length])
