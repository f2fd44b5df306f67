"""Files appear whole or not at all, on a disk and in memory; what goes wrong is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from persia.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, StorageError
from persia.storage.location import Location


def through_arrow(path: Path) -> Location:
    """As HDFS is reached: through pyarrow, without a rename over a file."""
    arrow = pytest.importorskip("pyarrow.fs")
    from fsspec.implementations.arrow import ArrowFSWrapper

    return Location(ArrowFSWrapper(arrow.LocalFileSystem()), str(path))


@pytest.fixture(params=["local", "memory", "arrow"])
def location(request: Any, tmp_path: Path) -> Location:
    if request.param == "arrow":
        return through_arrow(tmp_path / "a")
    return Location.of(tmp_path / "a" if request.param == "local" else f"memory://{tmp_path}/a")


def test_file_appears_when_it_is_complete(location: Location) -> None:
    file = location / "x" / "data"
    with file.create() as sink:
        sink.write(b"one")
        sink.write(b"two")
    assert (file.size(), file.read(max_bytes=10)) == (6, b"onetwo")
    assert file.read_range(2, 2) == b"et"
    assert file.read_range(4, 100) == b"wo"
    assert [child.name for child in (location / "x").children()] == ["data"]


def test_nothing_is_left_of_a_file_that_broke_off(location: Location) -> None:
    file = location / "data"

    def break_off() -> None:
        with file.create() as sink:
            sink.write(b"one")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert not file.exists()
    assert location.children() == []


def test_replace_swaps_the_whole_file(location: Location) -> None:
    file = location / "manifest"
    file.replace(b"old and long")
    file.replace(b"new")
    assert file.read(max_bytes=10) == b"new"
    assert [child.name for child in location.children()] == ["manifest"]


def test_a_swap_in_two_steps_may_break_off_anywhere(tmp_path: Path) -> None:
    directory = through_arrow(tmp_path)
    file = directory / "manifest"
    (tmp_path / "manifest.next").write_bytes(b"new")  # between the two steps: the old one is gone
    assert file.exists_replaced()
    assert file.read_replaced(max_bytes=9) == b"new"
    file.replace(b"newer")
    assert file.read_replaced(max_bytes=9) == b"newer"
    (tmp_path / "manifest.next").write_bytes(b"never came")  # before the first step
    assert file.read_replaced(max_bytes=9) == b"newer"
    file.replace(b"newest")
    assert file.read_replaced(max_bytes=9) == b"newest"
    assert [path.name for path in tmp_path.iterdir()] == ["manifest"]


def test_link_is_another_name(location: Location) -> None:
    (location / "a").replace(b"1")
    (location / "b").replace(b"2")
    (location / "a").link(location / "b")
    (location / "a").remove()
    assert (location / "b").read(max_bytes=1) == b"1"
    assert [child.name for child in location.children()] == ["b"]


def test_remove_takes_all_below(location: Location) -> None:
    (location / "x" / "y").replace(b"1")
    location.remove()
    location.remove()
    assert location.children() == []


def test_missing_and_too_large_files_are_named(location: Location) -> None:
    with pytest.raises(NotFoundError, match=r"a/nothing does not exist"):
        (location / "nothing").size()
    (location / "big").replace(b"x" * 11)
    with pytest.raises(StorageError, match=r"a/big has 11 bytes, more than the 10"):
        (location / "big").read(max_bytes=10)


def test_local_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(Location.of("model")) == str(tmp_path / "model")
    assert str(Location.of("memory://m/x/")) == "memory:///m/x"


def test_unusable_locations_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="nosuch://x"):
        Location.of("nosuch://x")
    with pytest.raises(InvalidArgumentError, match="empty"):
        Location.of("")


def test_missing_client_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(FailedPreconditionError, match="abfs://x.*adlfs"):
        Location.of("abfs://x/y")


def test_forbidden_directory_is_an_error_at_once(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_bytes(b"")
    with pytest.raises(StorageError, match="could not be written"):
        (Location.of(blocker) / "x").replace(b"1")


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    # A limit of the file size is what a full disk looks like to a process; it holds for that process alone.
    program = f"""
import resource, signal
from persia.storage.location import Location
from persia.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
file = Location.of({os.fspath(tmp_path)!r}) / "data"
try:
    with file.create() as sink:
        for _ in range(3):
            sink.write(bytes(1 << 20))
except StorageError as error:
    print(error)
try:
    file.replace(bytes(2 << 20))
except StorageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.count("could not be written: [Errno 27] File too large") == 2, done.stdout
    assert list(tmp_path.iterdir()) == []
