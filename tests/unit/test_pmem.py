"""`persia.pmem`: pools made, inspected, checked and grown; what it says of broken ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from persia import errors, pmem

MIB = 1 << 20


@pytest.fixture(
    params=["file", pytest.param("pmem", marks=pytest.mark.skipif(not pmem.HAS_PMEM, reason="no libpmem"))]
)
def kind(request: pytest.FixtureRequest) -> pmem.Kind:
    return request.param


def test_a_new_pool_is_empty_and_grows(tmp_path: Path, kind: pmem.Kind) -> None:
    info = pmem.create(tmp_path, size_bytes=4 * MIB, kind=kind, schema="adagrad", extent_bytes=MIB)
    assert (info.committed, info.num_rows, info.size_bytes, info.schema) == (0, 0, 4 * MIB, "adagrad")
    assert pmem.inspect(tmp_path) == info
    assert pmem.grow(tmp_path, 8 * MIB).size_bytes == 8 * MIB
    with pytest.raises(errors.InvalidArgumentError, match="pools only grow"):
        pmem.grow(tmp_path, 4 * MIB)
    report = pmem.check(tmp_path)
    assert report.is_whole
    assert report.num_living == 0
    with pmem.open(tmp_path, kind=kind) as pool:
        assert len(pool) == 0
        assert pool.signs().dtype == np.uint64
        with pytest.raises(errors.NotFoundError, match="sign 7"):
            pool[7]


def test_one_user_at_a_time(tmp_path: Path) -> None:
    pmem.create(tmp_path, size_bytes=32 * MIB)
    with pmem.open(tmp_path):
        assert pmem.inspect(tmp_path).committed == 0
        for use in (pmem.open, pmem.check, lambda path: pmem.grow(path, 64 * MIB)):
            with pytest.raises(errors.UnavailableError, match="in use"):
                use(tmp_path)
    pool = pmem.open(tmp_path)
    pool.close()
    pool.close()
    with pytest.raises(errors.FailedPreconditionError, match="closed"):
        _ = pool.committed


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFoundError, match=r"no pool in .*create one"):
        pmem.inspect(tmp_path)
    with pytest.raises(errors.NotFoundError, match="no directory"):
        pmem.create(tmp_path / "nowhere", size_bytes=32 * MIB)
    with pytest.raises(errors.InvalidArgumentError, match=r"size_bytes is 1000.*at least"):
        pmem.create(tmp_path, size_bytes=1000)
    with pytest.raises(errors.InvalidArgumentError, match="'file' or 'pmem'"):
        pmem.create(tmp_path, size_bytes=32 * MIB, kind="tape")  # type: ignore[arg-type]
    pmem.create(tmp_path, size_bytes=32 * MIB)
    with pytest.raises(errors.FailedPreconditionError, match="there is a pool"):
        pmem.create(tmp_path, size_bytes=32 * MIB)


def test_a_damaged_header_is_seen(tmp_path: Path) -> None:
    pmem.create(tmp_path, size_bytes=32 * MIB)
    (tmp_path / "rows.pool").write_bytes(b"x" * 8192)
    with pytest.raises(errors.CorruptionError, match="no pool"):
        pmem.inspect(tmp_path)
    (tmp_path / "rows.pool").write_bytes(b"x" * 100)
    with pytest.raises(errors.CorruptionError, match="at least"):
        pmem.check(tmp_path)
