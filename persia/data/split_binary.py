"""Split-binary data: raw numbers in a file for each categorical feature, the numerical ones and the label."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from persia.data.feature_spec import FeatureSpec
from persia.embedding.checks import ascending, at_least
from persia.embedding.data import (
    MAX_BATCH_SIZE,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import CorruptionError, InvalidArgumentError, NotFoundError

_Array = NDArray[Any]
_SCANNED_ROWS = 1 << 20


class SplitBinaryBatches:
    """The rows of one mapping of a `FeatureSpec` as batches, memory-mapped. The last batch may be shorter.

    A batch has the label, float32 [batch, 1]; one dense feature, float32 [batch, numerical features], unless
    there are none; and one ID feature for each categorical feature.

    With `shuffle_seed` the blocks of `block_size` rows are shuffled, in another order each epoch. The rows of
    a block stay together. An incomplete block stays at the end. 8 bytes of memory are used for each block.

    Args:
        spec: a `FeatureSpec`, or the path of one.
        mapping: `train`, `test` or another name in its `source_spec`.
        batch_size: rows of a batch.
        shuffle_seed: None: the order of the files.
        block_size: rows of a block, a divisor of `batch_size`; None: `batch_size`, which shuffles batches.

    Raises:
        NotFoundError: a file is missing.
        CorruptionError: a truncated file, or files that have different numbers of rows.
        InvalidArgumentError: an unknown mapping, no rows, or sizes that do not fit.
    """

    def __init__(
        self,
        spec: FeatureSpec | str | os.PathLike[str],
        mapping: str = "train",
        *,
        batch_size: int = 32768,
        shuffle_seed: int | None = None,
        block_size: int | None = None,
    ) -> None:
        self.spec = spec if isinstance(spec, FeatureSpec) else FeatureSpec.load(spec)
        self.mapping, self.batch_size = mapping, at_least(1, "batch_size", batch_size)
        if batch_size > MAX_BATCH_SIZE:
            raise InvalidArgumentError(f"batch_size={batch_size} is above {MAX_BATCH_SIZE}: make it smaller")
        self.block_size = at_least(1, "block_size", batch_size if block_size is None else block_size)
        if batch_size % self.block_size:
            raise InvalidArgumentError(
                f"block_size={block_size} does not divide batch_size={batch_size}: a batch has whole blocks"
            )
        if shuffle_seed is not None:
            at_least(0, "shuffle_seed", shuffle_seed)
        self.shuffle_seed, self._epoch = shuffle_seed, 0
        self._order: NDArray[np.int64] | None = None
        self._files: dict[str, tuple[Path, _Array]] = {}
        if mapping in self.spec.parquet:
            raise InvalidArgumentError(
                f"source_spec.{mapping} in {self.spec.directory} is Parquet: read it with "
                "ParquetBatches.of_spec"
            )
        for names, file in self.spec.chunks(mapping):
            self._open(names, self.spec.directory / file)
        self.num_rows = self._checked_rows()
        self._offsets = np.arange(batch_size + 1, dtype=np.uint32)

    def __len__(self) -> int:
        """The number of batches."""
        return -(-self.num_rows // self.batch_size)

    def of_epoch(self, epoch: int) -> Self:
        """These batches in the order of an epoch, from 0. They share the files."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._epoch, made._order = at_least(0, "epoch", epoch), None
        return made

    def read(self, first: int = 0) -> Iterator[int]:
        """The numbers of batch `first` and of those after it: nothing is read before `make`."""
        yield from range(first, len(self))

    def read_some(self, numbers: Iterable[int]) -> Iterator[int]:
        """The numbers of batches, ascending: nothing is read before `make`.

        Raises InvalidArgumentError for a number that is not above the one before, or beyond the last batch.
        """
        yield from ascending(numbers, len(self))

    def rows_decoded(self, count: int) -> int:
        """The rows of the first `count` batches: `make` reads no others."""
        return min(count * self.batch_size, self.num_rows)

    def make(self, rows: int, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
        """Batch number `rows`. Raises CorruptionError, which names file, field and offset of a value."""
        labels = self._values(self.spec.label, rows)
        ids = [self._ids(name, self._values(name, rows)) for name in self.spec.categorical]
        dense = None
        if self.spec.numerical:
            values = self._values(self.spec.numerical[0], rows).astype(np.float32)
            dense = [NonIDTypeFeature(values, "dense")]
        label = Label(labels.astype(np.float32).reshape(-1, 1), "label")
        return PersiaBatch(ids, dense, [label], requires_grad=requires_grad, meta=meta)

    def check_values(self) -> None:
        """Reads all files once and checks each value, so that training does not meet a wrong one.

        Raises CorruptionError as `make` does.
        """
        for name in self._files:
            for first in range(0, self.num_rows, _SCANNED_ROWS):
                self._check(name, self._files[name][1][first : first + _SCANNED_ROWS], first)

    def _open(self, names: Sequence[str], path: Path) -> None:
        feature = self.spec.features[names[0]]
        width = len(names) if names[0] in self.spec.numerical else feature.hotness
        # Labels are looked at as bytes: a bool of another byte than 0 and 1 would be read as true.
        dtype = np.dtype(np.uint8 if names[0] == self.spec.label else feature.dtype).newbyteorder("<")
        if not path.is_file():
            raise NotFoundError(
                f"there is no file {path} of {names[0]!r}, which source_spec.{self.mapping} names: correct "
                "feature_spec.yaml, or copy the file"
            )
        size, row = path.stat().st_size, dtype.itemsize * width
        if size % row:
            raise CorruptionError(
                f"{path}: field {names[0]!r} ends in the middle of a row at offset {size - size % row} of "
                f"{size}: a row has {row} bytes ({width} of {dtype.name}); copy the file again, or "
                "correct its dtype"
            )
        if not size:
            raise InvalidArgumentError(f"{path} of {names[0]!r} has no rows: copy the file again")
        array = np.memmap(path, dtype, mode="r")
        self._files[names[0]] = (path, array.reshape(-1, width) if width > 1 or len(names) > 1 else array)
        if names[0] in self.spec.numerical:
            self._files[names[0]] = (path, array.reshape(-1, width))

    def _checked_rows(self) -> int:
        """The number of rows, which all files must have: that of most of them is taken as the right one."""
        sizes = {name: len(array) for name, (_, array) in self._files.items()}
        num_rows = max(sizes.values(), key=list(sizes.values()).count)
        for name, size in sizes.items():
            if size != num_rows:
                path, array = self._files[name]
                raise CorruptionError(
                    f"{path}: field {name!r} ends at offset {array.nbytes}, after {size} rows of "
                    f"{array.dtype.name}; other files of {self.mapping!r} have {num_rows}: copy the file "
                    "again, or correct its dtype or hotness in feature_spec.yaml"
                )
        return num_rows

    def _values(self, name: str, batch: int) -> _Array:
        """The checked values of one batch."""
        if not 0 <= batch < len(self):
            raise InvalidArgumentError(f"there is no batch {batch}: there are {len(self)}")
        array = self._files[name][1]
        first = batch * self.batch_size
        if self.shuffle_seed is None:
            values = array[first : first + self.batch_size]
            self._check(name, values, first)
            return values
        blocks = self._blocks()[first // self.block_size : (first + self.batch_size) // self.block_size]
        num_whole = self.num_rows // self.block_size
        shape = (num_whole, self.block_size, *array.shape[1:])
        values = array[: num_whole * self.block_size].reshape(shape)[blocks].reshape(-1, *array.shape[1:])
        if batch == len(self) - 1:  # with the block that is not whole
            values = np.concatenate([values, array[num_whole * self.block_size :]])
        if not self._is_right(name, values).all():
            self.check_values()  # names the place
        return values

    def _blocks(self) -> NDArray[np.int64]:
        if self._order is None:
            random = np.random.default_rng([self.shuffle_seed or 0, self._epoch])
            self._order = random.permutation(self.num_rows // self.block_size)
        return self._order

    def _ids(self, name: str, values: _Array) -> IDTypeFeature:
        ids = values.astype(np.uint64)
        if self.spec.features[name].hotness == 1:
            return IDTypeFeatureWithSingleID(name, ids)
        offsets = self._offsets[: len(ids) + 1] * np.uint32(ids.shape[1])
        return IDTypeFeature.from_csr(name, ids.reshape(-1), offsets)

    def _is_right(self, name: str, values: _Array) -> NDArray[np.bool_]:
        if name == self.spec.label:
            return np.asarray(values <= 1)
        if name in self.spec.numerical:
            return np.isfinite(values)
        cardinality = self.spec.features[name].cardinality
        if cardinality is None:
            return np.ones(1, bool)
        # As unsigned numbers, negative ones are large: one comparison for both bounds.
        return np.asarray(values.view(f"u{values.dtype.itemsize}") < cardinality)

    def _check(self, name: str, values: _Array, first: int) -> None:
        right = self._is_right(name, values)
        if right.all():
            return
        path, array = self._files[name]
        index = int(np.argmin(right.reshape(-1)))
        width = 1 if values.ndim == 1 else values.shape[1]
        field = self.spec.numerical[index % width] if name in self.spec.numerical else name
        offset = (first * width + index) * array.dtype.itemsize
        cardinality = self.spec.features[name].cardinality
        wanted = "0 or 1" if name == self.spec.label else "a finite number"
        wanted = wanted if cardinality is None else f"0 to {cardinality - 1}, by its cardinality"
        raise CorruptionError(
            f"{path}: field {field!r} is {values.reshape(-1)[index]} at offset {offset} (row "
            f"{first + index // width}), must be {wanted}: correct dtype and cardinality in "
            "feature_spec.yaml, or copy the file again"
        )


class SplitBinaryWriter:
    """Writes one mapping of a `FeatureSpec`, and the spec itself.

    The files get their names when the `with` block ends without an error.

    Args:
        spec: its directory is created.
        mapping: one of its `source_spec`.
    """

    def __init__(self, spec: FeatureSpec, mapping: str) -> None:
        self._spec, self._mapping = spec, mapping
        self._paths = {names[0]: spec.directory / file for names, file in spec.chunks(mapping)}
        self._files: dict[str, IO[bytes]] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        for name, path in self._paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = self._resources.enter_context(open(f"{path}.part", "wb"))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._resources.close()
        for path in self._paths.values():
            part = Path(f"{path}.part")
            if kind is None:
                part.replace(path)
            else:
                part.unlink(missing_ok=True)
        if kind is None:
            self._spec.save()

    def write(self, numerical: _Array | None, categorical: Sequence[_Array], labels: _Array) -> None:
        """Appends rows to all files, or to none if a value is wrong.

        Args:
            numerical: [rows, numerical features]; None: there are none.
            categorical: integers [rows] or [rows, hotness] of each feature.
            labels: 0 or 1, [rows].

        Raises InvalidArgumentError for another number of arrays or another shape than the spec has, and for
        values that the files cannot hold.
        """
        spec = self._spec
        if len(categorical) != len(spec.categorical):
            raise InvalidArgumentError(
                f"categorical has {len(categorical)} arrays, the spec has {len(spec.categorical)} features "
                f"({', '.join(spec.categorical)}): pass one array a feature"
            )
        if (numerical is None) == bool(spec.numerical):
            given = "None" if numerical is None else f"an array of shape {np.shape(numerical)}"
            raise InvalidArgumentError(
                f"numerical is {given}, the spec has {len(spec.numerical)} numerical features: pass an array "
                "[rows, features], or None if there are none"
            )
        columns = {spec.label: labels, **dict(zip(spec.categorical, categorical, strict=True))}
        if numerical is not None:
            columns[spec.numerical[0]] = numerical
        num_rows = np.size(labels)
        # All are checked before the first is written: files of different lengths are no data set.
        checked = [
            (name, self._checked(name, np.asarray(values), num_rows)) for name, values in columns.items()
        ]
        for name, array in checked:
            self._files[name].write(array.tobytes())

    def _checked(self, name: str, array: _Array, num_rows: int) -> _Array:
        """The values of one file in its dtype. Raises InvalidArgumentError for a wrong one."""
        spec, feature = self._spec, self._spec.features[name]
        is_numerical = name in spec.numerical
        width = len(spec.numerical) if is_numerical else feature.hotness
        shape = (num_rows, width) if width > 1 or is_numerical else (num_rows,)
        if array.shape != shape:
            raise InvalidArgumentError(f"{name!r} has shape {array.shape}, must have {shape}")
        kinds, wanted = ("iu", "integers") if name in spec.categorical else ("biuf", "numbers")
        if array.size and array.dtype.kind not in kinds:
            raise InvalidArgumentError(
                f"{name!r} has dtype {array.dtype} (first value {array.flat[0]}): pass {wanted}"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # the checks below name the value
            cast = array.astype(np.dtype(feature.dtype).newbyteorder("<"))
        if name == spec.label:
            right, wanted = (array == 0) | (array == 1), "0 or 1"
        elif is_numerical:
            right, wanted = np.isfinite(cast), f"finite in {feature.dtype}"
        elif feature.cardinality is not None:
            right = (array >= 0) & (array < feature.cardinality)
            wanted = f"0 to {feature.cardinality - 1}, by its cardinality"
        else:  # hashed: any 64 bits
            return cast
        if not right.all():
            index = int(np.argmin(right.reshape(-1)))
            field = spec.numerical[index % width] if is_numerical else name
            raise InvalidArgumentError(
                f"{field!r} is {array.reshape(-1)[index]} in row {index // width} of this call, must be "
                f"{wanted}"
            )
        return cast
