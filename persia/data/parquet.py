"""Batches of Parquet files, by the names of their columns."""

from __future__ import annotations

import copy
import difflib
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from persia.data.feature_spec import FeatureSpec
from persia.embedding.checks import ascending, at_least
from persia.embedding.data import MAX_BATCH_SIZE, IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.errors import CorruptionError, InvalidArgumentError, InvalidTypeError, NotFoundError
from persia.optional import needs

_FILE = b"persia.file"  # key of a table's metadata: the file of its first row


class ParquetBatches:
    """The rows of Parquet files, in the order of files and rows, as batches. The last batch may be shorter.

    A batch has one label and one dense feature, float32 [batch, number of columns] each, and one ID feature
    for each column of `ids`. There is no dense feature if `dense` is empty. A null in an ID column is a
    sample without an ID. Strings are hashed by `persia.embedding.data.hash_strings`. Null and NaN in a dense
    column are 0. Every file must have the same columns; columns that have no role may differ.

    With `shuffle_seed` the row groups are shuffled, in another order each epoch. Rows of a group stay
    together, as a group is what can be read alone. Write small row groups, of tens of thousands of rows, if
    the order of the files means anything, such as time.

    Args:
        files: a file, a directory, a pattern such as `"clicks/2026-*.parquet"`, or a list of files. They are
            read in sorted order; a list, in its own. A directory stands for its `*.parquet` files, also
            those of its subdirectories.
        labels: columns of numbers or bools without nulls, at least one.
        dense: columns of numbers or bools.
        ids: columns of integers or strings, or of lists of them, at least one; each is the slot of its name.
        batch_size: rows of a batch.
        shuffle_seed: None: the order of the files.

    Raises:
        NotFoundError: no files.
        InvalidArgumentError: a file that is not Parquet, a column that a file lacks or has twice, no rows, or
            no labels or IDs.
        InvalidTypeError: a column of a type that its role cannot have, or that differs among the files.
        FailedPreconditionError: pyarrow is not installed.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str],
        *,
        labels: Sequence[str],
        ids: Sequence[str],
        dense: Sequence[str] = (),
        batch_size: int = 1024,
        shuffle_seed: int | None = None,
    ) -> None:
        self.batch_size = at_least(1, "batch_size", batch_size)
        if batch_size > MAX_BATCH_SIZE:
            raise InvalidArgumentError(f"batch_size={batch_size} is above {MAX_BATCH_SIZE}: make it smaller")
        self.shuffle_seed = None if shuffle_seed is None else at_least(0, "shuffle_seed", shuffle_seed)
        self._epoch = 0
        for role, names in {"labels": labels, "dense": dense, "ids": ids}.items():
            if isinstance(names, str):
                raise InvalidTypeError(f"{role}={names!r} is a string: pass a list, {role}=[{names!r}]")
        self.labels, self.dense, self.ids = list(labels), list(dense), list(ids)
        self._data = open_files(files)
        self._check_columns()
        self._check_files()
        self.num_rows: int = self._data.count_rows()
        if not self.num_rows:
            raise InvalidArgumentError(f"the files have no rows: {_listed(self._data.files)}")
        # Numbers of batches. `split` makes parts by these alone: both read the same open files.
        self._begin, self._end = 0, int(-(-self.num_rows // batch_size))
        self._limits: dict[str, int] = {}  # cardinalities of a feature spec
        self._counts: dict[str, int] = {}  # IDs of a sample, where a feature spec names several

    @classmethod
    def of_spec(
        cls,
        spec: FeatureSpec | str | os.PathLike[str],
        mapping: str = "train",
        *,
        batch_size: int = 32768,
        shuffle_seed: int | None = None,
    ) -> Self:
        """The rows of one mapping of a `FeatureSpec` whose files are Parquet.

        Args:
            spec: a `FeatureSpec`, or the path of one.
            mapping: `train`, `test` or another name in its `source_spec`.
            batch_size: rows of a batch.
            shuffle_seed: None: the order of the files.

        Raises:
            InvalidArgumentError: an unknown mapping, or one whose files are split binary.
            CorruptionError: `metadata.rows` of the spec has another number of rows.

        It also raises what the constructor raises.
        """
        spec = spec if isinstance(spec, FeatureSpec) else FeatureSpec.load(spec)
        chunks = spec.chunks(mapping)
        if mapping not in spec.parquet:
            raise InvalidArgumentError(
                f"source_spec.{mapping} in {spec.directory} is split binary: read it with "
                "SplitBinaryBatches, or either type with open_batches"
            )
        ((_, place),) = chunks
        names = {"labels": [spec.label], "dense": spec.numerical, "ids": spec.categorical}
        made = cls(spec.directory / place, **names, batch_size=batch_size, shuffle_seed=shuffle_seed)
        wanted = (spec.metadata.get("rows") or {}).get(mapping, made.num_rows)
        if made.num_rows != wanted:
            raise CorruptionError(
                f"{spec.directory / place} has {made.num_rows} rows, metadata.rows.{mapping} of the feature "
                f"spec says {wanted}: a file is missing or does not belong there; copy the files again"
            )
        made._limits = {name: size for name in made.ids if (size := spec.features[name].cardinality)}
        made._counts = {name: count for name in made.ids if (count := spec.features[name].hotness) > 1}
        return made

    def check_values(self) -> None:
        """Reads all files once and checks each value, so that training does not meet a wrong one.

        Raises InvalidArgumentError as `make` does, and CorruptionError for an ID that is not below the
        cardinality of its feature spec, or a row without the IDs of its hotness: names file, column and row.
        """
        import pyarrow as pa

        columns = [*dict.fromkeys((*self.labels, *self.dense, *self.ids))]
        for file in self._data.get_fragments():
            first = 0
            for rows in file.to_batches(columns=columns, batch_size=MAX_BATCH_SIZE, schema=self._data.schema):
                for name, limit in self._limits.items():
                    _check_ids(file.path, name, rows.column(name), limit, first)
                for name, count in self._counts.items():
                    _check_count(file.path, name, rows.column(name), count, first)
                table = pa.Table.from_batches([rows]).replace_schema_metadata({_FILE: file.path})
                self.make(table, requires_grad=False)
                first += rows.num_rows

    def __len__(self) -> int:
        """The number of batches."""
        return self._end - self._begin

    def split(self, share: float) -> tuple[Self, Self]:
        """All but the last `share` of the batches, and these; each part has at least one.

        The last ones, as files are often in the order of time. Raises InvalidArgumentError if there is only
        one batch, if they are shuffled, or for a share that is not between 0 and 1.
        """
        if self.shuffle_seed is not None:
            raise InvalidArgumentError(
                f"shuffle_seed={self.shuffle_seed}: each epoch would split other rows off; leave it out, or "
                "use separate files"
            )
        if not 0 < share < 1 or len(self) < 2:
            raise InvalidArgumentError(
                f"share={share} of {len(self)} batches: it must be between 0 and 1, of at least 2 batches; "
                "make batch_size smaller, or use separate files"
            )
        cut = min(max(round(len(self) * (1 - share)), 1), len(self) - 1)
        return self._part(0, cut), self._part(cut, len(self))

    def of_epoch(self, epoch: int) -> Self:
        """These batches in the order of an epoch, from 0. They share the files."""
        # Shallow: the files stay open once, and nothing else of this object changes after it was made.
        made = copy.copy(self)
        made._epoch = at_least(0, "epoch", epoch)
        return made

    def read(self, first: int = 0) -> Iterator[Any]:
        """The rows of batch `first` and of all later ones, as Arrow tables. Skips earlier row groups."""
        return self.read_some(range(first, len(self)))

    def read_some(self, numbers: Iterable[int]) -> Iterator[Any]:
        """The rows of batches with ascending `numbers`. Reads each row group with such rows once.

        Raises InvalidArgumentError for a number that is not above the one before, or beyond the last batch.
        """
        import pyarrow as pa

        columns = [*dict.fromkeys((*self.labels, *self.dense, *self.ids))]
        begins = ((self._begin + number) * self.batch_size for number in ascending(numbers, len(self)))
        begin, parts, taken, end = next(begins, None), [], 0, 0
        for group in self._row_groups():
            if begin is None:
                return
            # Not by group.count_rows(), which counts the rows of the whole file.
            if begin + taken >= end + (num_rows := group.row_groups[0].num_rows):
                end += num_rows
                continue
            for rows in group.to_batches(
                columns=columns, batch_size=self.batch_size, schema=self._data.schema
            ):
                # `first` to `end`: the rows of this piece in the order of all rows. Batches neither begin nor
                # end where pieces do.
                first, end = end, end + rows.num_rows
                while begin is not None and begin + taken < end:
                    part = rows.slice(begin + taken - first, self.batch_size - taken)
                    table = pa.Table.from_batches([part])
                    parts.append(table.replace_schema_metadata({_FILE: group.path}))
                    taken += part.num_rows
                    if taken == self.batch_size:
                        yield parts[0] if len(parts) == 1 else pa.concat_tables(parts)
                        begin, parts, taken = next(begins, None), [], 0
                if begin is None:
                    return
        if parts:
            yield pa.concat_tables(parts)

    def rows_decoded(self, count: int) -> int:
        """The rows of all row groups with rows of the first `count` batches: a row group is decoded whole."""
        begin, passed, decoded = self._begin * self.batch_size, 0, 0
        for group in self._row_groups():
            passed += (num_rows := group.row_groups[0].num_rows)
            decoded += num_rows if passed > begin else 0
            if passed >= begin + count * self.batch_size:
                break
        return decoded

    def make(self, rows: Any, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
        """The batch of an Arrow table.

        Raises InvalidArgumentError for a null label, and for a number that float32 cannot hold.
        """
        labels, dense = _numbers(rows, self.labels), _numbers(rows, self.dense)
        _refuse(rows, self.labels, np.isnan(labels), "nulls or NaN", "remove these rows from the files")
        for names, numbers in ((self.labels, labels), (self.dense, dense)):
            remedy = "replace these values in the files, by nulls or by smaller numbers"
            _refuse(rows, names, np.isinf(numbers), "values that are Inf or too large for float32", remedy)
        dense = np.nan_to_num(dense, copy=False)
        return PersiaBatch(
            [IDTypeFeature.from_arrow(name, rows[name]) for name in self.ids],
            [NonIDTypeFeature(dense, "dense")] if self.dense else None,
            [Label(labels, "label")],
            requires_grad=requires_grad,
            meta=meta,
        )

    def _row_groups(self) -> Iterable[Any]:
        groups = (group for file in self._data.get_fragments() for group in file.split_by_row_group())
        if self.shuffle_seed is None:
            return groups
        listed = list(groups)
        # By seed and epoch alone, so that every loader, and one that resumes in the middle of an epoch, has
        # the same order.
        order = np.random.default_rng([self.shuffle_seed, self._epoch]).permutation(len(listed))
        return (listed[place] for place in order)

    def _part(self, begin: int, end: int) -> Self:
        part = copy.copy(self)
        part._begin, part._end = self._begin + begin, self._begin + end
        return part

    def _check_columns(self) -> None:
        import pyarrow.types as types

        if not self.labels or not self.ids:
            raise InvalidArgumentError(
                f"labels={self.labels} and ids={self.ids}: name at least one column of each"
            )
        if twice := [name for name in dict.fromkeys(self.ids) if self.ids.count(name) > 1]:
            raise InvalidArgumentError(f"ids has {_listed(twice)} more than once: a column is one slot")
        schema = self._data.schema
        for name in (*self.labels, *self.dense, *self.ids):
            if name not in schema.names:
                near = difflib.get_close_matches(name, schema.names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(schema.names)}"
                raise InvalidArgumentError(
                    f"the files have no column {name!r}: {hint} (in {self._data.files[0]})"
                )
        for name in (*self.labels, *self.dense):
            kind = schema.field(name).type
            if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
                raise InvalidTypeError(
                    f"column {name!r} is of {kind}: labels and dense columns must be numbers or bools; "
                    "name it in ids, or convert it in the files"
                )
        for name in self.ids:
            kind = schema.field(name).type
            if types.is_floating(getattr(kind, "value_type", kind)):
                raise InvalidTypeError(
                    f"ID column {name!r} is of {kind}: IDs are integers or strings, or lists of them; name "
                    "it in dense, or cast it to int64 in the files (pandas: .astype('Int64'))"
                )

    def _check_files(self) -> None:
        """Checks all files now: a difference would be found in the middle of training, or read as nulls."""
        columns = [*dict.fromkeys((*self.labels, *self.dense, *self.ids))]
        for file in self._data.get_fragments():
            schema = _schema(file)
            for name in columns:
                if name not in schema.names:
                    raise InvalidArgumentError(
                        f"{file.path} has no column {name!r}, {self._data.files[0]} has: add it to the file, "
                        "or leave the file out"
                    )
                kind, wanted = schema.field(name).type, self._data.schema.field(name).type
                if not _fits(kind, wanted):
                    raise InvalidTypeError(
                        f"column {name!r} is of {kind} in {file.path}, and of {wanted} in "
                        f"{self._data.files[0]}: write the files with the same types"
                    )


def _numbers(rows: Any, names: Sequence[str]) -> NDArray[np.float32]:
    """[rows, columns]; a null is NaN."""
    numbers = np.empty((rows.num_rows, len(names)), np.float32)
    for index, name in enumerate(names):
        numbers[:, index] = rows[name].cast("float32", safe=False).to_numpy()
    return numbers


def _refuse(rows: Any, names: Sequence[str], wrong: NDArray[np.bool_], what: str, remedy: str) -> None:
    for name, count in zip(names, wrong.sum(axis=0), strict=True):
        if count:
            file = (rows.schema.metadata or {}).get(_FILE)
            place = f" in a batch that begins in {os.fsdecode(file)}" if file else ""
            raise InvalidArgumentError(
                f"column {name!r} has {count} {what} among {rows.num_rows} rows{place}: {remedy}"
            )


def _check_ids(path: str, name: str, column: Any, limit: int, first: int) -> None:
    """`first`: the row of the file that `column` begins with."""
    import pyarrow.compute as compute
    import pyarrow.types as types

    rows, values = None, column
    if _is_list(column.type):
        rows, values = compute.list_parent_indices(column), column.flatten()
    if not types.is_integer(values.type):
        raise InvalidTypeError(
            f"{path}: column {name!r} is of {column.type}, and its cardinality of {limit} in the feature "
            "spec needs integers: leave the cardinality out, or write integers"
        )
    numbers = values.fill_null(0).to_numpy(zero_copy_only=False)
    wrong = (numbers < 0) | (numbers >= limit)
    if wrong.any():
        index = int(np.argmax(wrong))
        row = first + (index if rows is None else rows[index].as_py())
        raise CorruptionError(
            f"{path}: column {name!r} is {numbers[index]} in row {row}, must be 0 to {limit - 1}, by its "
            "cardinality: correct the cardinality in feature_spec.yaml, or copy the file again"
        )


def _check_count(path: str, name: str, column: Any, count: int, first: int) -> None:
    """`first`: the row of the file that `column` begins with."""
    import pyarrow.compute as compute

    found = np.ones(len(column), np.int64)
    if _is_list(column.type):
        found = compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    if (wrong := found != count).any():
        index = int(np.argmax(wrong))
        raise CorruptionError(
            f"{path}: column {name!r} has {found[index]} IDs in row {first + index}, must have {count}, by "
            "its hotness: correct the hotness in feature_spec.yaml, leave it out, or write such lists"
        )


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return hasattr(kind, "value_type") and not types.is_dictionary(kind)


def open_files(files: str | os.PathLike[str] | Sequence[str]) -> Any:
    """The files as a data set of pyarrow, with the schema of the first one. Raises as ParquetBatches does."""
    pa = require_pyarrow()
    dataset = pa.dataset
    nothing = pa.schema([])  # so that pyarrow opens no file yet
    hint = ""
    if isinstance(files, str | os.PathLike):
        path = os.fspath(files)
        found = [path] if os.path.exists(path) else sorted(glob.glob(path))
        if os.path.isdir(path):
            inside = dataset.dataset(path, schema=nothing, format="parquet").files
            found = sorted(file for file in inside if file.endswith(".parquet"))
            hint = " with names that end in .parquet; for other names pass a pattern, 'DIRECTORY/*'"
    else:
        found = [os.fspath(file) for file in files]
    if not found:
        raise NotFoundError(f"there are no files {files!s}{hint} (seen from {os.getcwd()}): correct the path")
    for file in found:
        if not os.path.exists(file):
            raise NotFoundError(f"there is no file {file} (seen from {os.getcwd()}): correct the path")
        if os.path.isdir(file):
            raise InvalidArgumentError(f"{file} is a directory: pass it alone, or name its files")
    data = dataset.dataset(found, schema=nothing, format="parquet")
    return data.replace_schema(_schema(next(data.get_fragments())))


def require_pyarrow(what: str = "Parquet files need") -> Any:
    """pyarrow with its modules of files. Raises FailedPreconditionError if it is not installed."""
    with needs(f"{what} pyarrow, which cannot be imported", "'persia[arrow]'"):
        import pyarrow.dataset
        import pyarrow.parquet
    return pyarrow


def _schema(file: Any) -> Any:
    """The schema of one file of a data set."""
    import pyarrow as pa

    try:
        schema = file.physical_schema
    except (pa.ArrowException, OSError) as error:
        raise InvalidArgumentError(
            f"{file.path} cannot be read as a Parquet file ({error}): correct the path, or write it again"
        ) from error
    if twice := [name for name in dict.fromkeys(schema.names) if schema.names.count(name) > 1]:
        raise InvalidArgumentError(
            f"{file.path} has more than one column {_listed(twice)}: rename them in the file"
        )
    return schema


def _fits(kind: Any, wanted: Any) -> bool:
    """Whether all values of a column of one file can be read as the type of the first file."""
    import pyarrow.types as types

    def is_number(kind: Any) -> bool:
        return bool(types.is_integer(kind) or types.is_floating(kind))

    if types.is_list(kind) and types.is_list(wanted):
        return _fits(kind.value_type, wanted.value_type)
    if is_number(kind) and is_number(wanted):
        # Files are read by the schema of the first one. Narrower numbers are widened by it; wider ones
        # need not fit.
        return np.can_cast(kind.to_pandas_dtype(), wanted.to_pandas_dtype())
    texts = (types.is_string, types.is_large_string)
    both_texts = all(any(is_text(one) for is_text in texts) for one in (kind, wanted))
    return bool(kind == wanted or both_texts or types.is_null(kind))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
