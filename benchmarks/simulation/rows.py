"""The rows of a simulated server for dumps and loads, with the interfaces of persia._native that they use."""

from __future__ import annotations

import ctypes

from benchmarks.simulation.kernel import Kernel
from benchmarks.simulation.native import ParameterServer
from persia._native import TrainConfig


def _bytes_at(address: int) -> bytes:
    """What the library has copied there, which is freed."""
    library = Kernel.current.library
    size = ctypes.c_uint64.from_address(address).value
    content = ctypes.string_at(address + ctypes.sizeof(ctypes.c_uint64), size)
    library.free(address)
    return content


class Store:
    """persia._native.EmbeddingStore of a server."""

    def __init__(self, server: ParameterServer, index: int, replicas: int) -> None:
        self._server, self._share = server, (index, replicas)

    def remove_small_rows(self) -> None:
        """No slot has a min_norm."""

    def begin_snapshot(self, num_parts: int, **_options: object) -> Snapshot:
        kernel, handle = Kernel.current, self._server.handle
        return Snapshot(
            kernel.call(lambda p: kernel.library.snapshot(p, handle, num_parts, *self._share)), num_parts
        )

    def begin_load(self, config: TrainConfig, *, with_state: bool, fresh_state: bool) -> Loader:
        kernel, handle, encoded = Kernel.current, self._server.handle, config.encode()
        return Loader(
            kernel.call(
                lambda p: kernel.library.loader(
                    p, handle, encoded, len(encoded), with_state, fresh_state, *self._share
                )
            )
        )


class Snapshot:
    """persia._native.Snapshot."""

    def __init__(self, handle: int, num_parts: int) -> None:
        self._handle, self.num_parts = handle, num_parts
        library = Kernel.current.library
        self.num_rows, self.step = library.snapshot_num_rows(handle), library.snapshot_step(handle)
        config = library.snapshot_config(handle)
        self.train_config = TrainConfig.decode(_bytes_at(config)) if config else None

    def part(self, index: int) -> SnapshotPart:
        return SnapshotPart(self._handle, index)

    def close(self) -> None:
        kernel = Kernel.current
        kernel.call(lambda p: kernel.library.snapshot_close(p, self._handle))


class SnapshotPart:
    """persia._native.SnapshotPart."""

    def __init__(self, snapshot: int, index: int) -> None:
        self._snapshot, self._index = snapshot, index

    @property
    def num_rows(self) -> int:
        return int(Kernel.current.library.snapshot_part_rows(self._snapshot, self._index))

    def read(self, max_bytes: int) -> bytes:
        kernel, place = Kernel.current, (self._snapshot, self._index)
        return _bytes_at(kernel.call(lambda p: kernel.library.snapshot_read(p, *place, max_bytes)))


class Loader:
    """persia._native.CheckpointLoader."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._kernel, self._process = Kernel.current, Kernel.current.process

    def __del__(self) -> None:
        # Not waited for: the last reference may end where nothing may wait.
        if self._kernel is Kernel.current and not self._process.is_dead:
            self._kernel.library.loader_end(self._process.number, self._handle)

    @property
    def num_rows(self) -> int:
        return int(self._kernel.library.loader_num_rows(self._handle))

    @property
    def num_evicted(self) -> int:
        return int(self._kernel.library.loader_num_evicted(self._handle))

    def verify(self, chunk: bytes) -> int:
        return self._take(chunk, is_added=False)

    def add(self, chunk: bytes) -> int:
        return self._take(chunk, is_added=True)

    def _take(self, chunk: bytes, *, is_added: bool) -> int:
        content = bytes(chunk)
        return self._kernel.call(
            lambda p: self._kernel.library.loader_chunk(p, self._handle, content, len(content), is_added)
        )

    def replace(self) -> None:
        self._kernel.call(lambda p: self._kernel.library.loader_replace(p, self._handle))

    def commit(self) -> None:
        self._kernel.call(lambda p: self._kernel.library.loader_commit(p, self._handle))
