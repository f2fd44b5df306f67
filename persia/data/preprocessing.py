"""Raw Criteo logs to Parquet or split binary: the same bytes by any engine and any number of partitions.

An engine runs `run_tasks` over partitions of tasks: text in, text out. A task is some blocks of one file, or
one column of counts. Its output and a marker file go to the output directory, which all machines share.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.data import tsv_blocks
from persia.data.feature_spec import FeatureSpec
from persia.data.parquet import require_pyarrow
from persia.data.split_binary import SplitBinaryWriter
from persia.embedding.checks import at_least
from persia.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, PersiaError

Engine = Callable[[list[str]], Iterable[str]]

_WORK = ".preprocess"
_REPORT = "preprocess.json"
_FORMATS = ("parquet", "split-binary")
_SHOWN = 5  # bad records in a message
_MERGED_IDS = 1 << 22  # at once, 16 bytes each


@dataclass(frozen=True)
class Preprocessing:
    """What is made of raw logs. The same settings and files make the same bytes."""

    output: str  # a directory
    format: str = "parquet"  # or `split-binary`
    num_numerical: int = 13
    num_categorical: int = 26
    frequency_limit: int = 0  # a value that occurs fewer times in all files of `train` becomes ID 1
    contiguous: bool = False  # IDs from 0, frequent ones first, instead of 64-bit hashes
    log_offset: float = 3.0  # numbers become ln(max(x + log_offset, 1))
    block_bytes: int = 32 << 20  # of uncompressed text; a Parquet file holds one block
    max_bad_records: int = 100  # that are skipped before preprocessing fails

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise InvalidArgumentError(f"format={self.format!r} is none of {', '.join(_FORMATS)}")
        for name, least in (("num_numerical", 0), ("num_categorical", 1), ("frequency_limit", 0)):
            at_least(least, name, getattr(self, name))
        at_least(1 << 10, "block_bytes", self.block_bytes)
        at_least(0, "max_bad_records", self.max_bad_records)

    @property
    def needs_counts(self) -> bool:
        """Whether all files of `train` are read once before they are transformed."""
        return self.contiguous or self.frequency_limit > 1


@dataclass
class Result:
    """What `preprocess` has written."""

    num_rows: dict[str, int] = field(default_factory=dict)  # of each mapping
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)  # the first ones: file, line and reason


def preprocess(
    settings: Preprocessing,
    inputs: Mapping[str, Sequence[str | os.PathLike[str]]],
    engine: Engine,
    *,
    partitions: int = 1024,
    allow_gaps: bool = False,
    progress: Callable[[str, int, int], None] = lambda title, done, total: None,
) -> Result:
    """Transforms raw logs. If it is interrupted, the same call resumes: finished blocks are kept.

    Args:
        settings: what to make.
        inputs: files of each mapping, such as `train` and `test`: plain text, `.gz` or `.zst`.
        engine: runs tasks: `LocalEngine`, `SparkEngine` or `RayEngine` of `persia.data.engines`.
        partitions: tasks, about. A compressed file is one task.
        allow_gaps: files may be numbered with gaps, as `day_4` and `day_6` without `day_5`.
        progress: called with a title, bytes done and bytes in all.

    Raises:
        NotFoundError: a file is missing, also one between numbered ones.
        InvalidArgumentError: more bad records than allowed: names file and line of the first ones.
        FailedPreconditionError: the output has other data, or pyarrow is missing.
        CorruptionError: a file that cannot be decompressed.
    """
    require_pyarrow("preprocessing needs")  # also for split binary
    files = _checked_files(inputs)
    if not allow_gaps:
        _check_numbers(path for paths in files.values() for path in paths)
    work = Path(settings.output) / _WORK
    _begin(settings, files, work)
    steps = ["count", "merge"] if settings.needs_counts else []
    results: list[dict[str, Any]] = []
    for step in (*steps, "transform"):
        tasks = _tasks(settings, files, step, at_least(1, "partitions", partitions))
        total = sum(task["bytes"] for task in tasks)
        results, done = [], 0
        # Text in, text out: engines differ in what they can send to their workers, and agree on strings.
        for text in engine([json.dumps(task) for task in tasks]):
            result = json.loads(text)
            if "error" in result:
                kind = next((k for k in _kinds(PersiaError) if k.__name__ == result["error"]), PersiaError)
                raise kind(result["message"])
            results.append(result)
            done += result["bytes"]
            progress(step, done, total)
            # After each result, so that a wrong file is found in minutes and not after a day of work.
            if sum(one["num_bad"] for one in results) > settings.max_bad_records:
                raise InvalidArgumentError(
                    f"more than {settings.max_bad_records} bad records (--max-bad-records):\n"
                    + "\n".join(_bad(settings, results))
                )
    result = Result(num_bad=sum(one["num_bad"] for one in results), bad=_bad(settings, results))
    # Engines return results in any order; files, IDs and reports must not depend on it.
    results.sort(key=lambda one: str(one["name"]))
    for mapping in files:
        of_mapping = [one for one in results if one["mapping"] == mapping]
        result.num_rows[mapping] = sum(one["num_rows"] for one in of_mapping)
        if not result.num_rows[mapping]:
            raise InvalidArgumentError(
                f"the files of {mapping!r} have no good record: {files[mapping][0]}, ..."
            )
        _publish(settings, mapping, [one["name"] for one in of_mapping if one["num_rows"]], list(files))
    if settings.format == "parquet":
        cardinalities, num_numerical = _cardinalities(settings), settings.num_numerical
        spec = FeatureSpec.make_parquet(
            settings.output, cardinalities, num_numerical=num_numerical, mappings=list(files)
        )
        replace(spec, metadata={"rows": result.num_rows}).save()
    report = {"settings": _identity(settings), "result": asdict(result)}
    _write(Path(settings.output) / _REPORT, json.dumps(report, indent=1).encode())
    # Last: what it holds is needed to resume until the report says that the output is complete.
    shutil.rmtree(work)
    return result


def run_tasks(batches: Iterable[Any]) -> Iterator[Any]:
    """Runs tasks on a partition: Arrow record batches of one column in, and out. Every engine calls it."""
    import pyarrow as pa

    for batch in batches:
        for task in batch.column(0).to_pylist():
            for result in _run(json.loads(task)):
                yield pa.RecordBatch.from_pydict({"result": [json.dumps(result)]})


def _run(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        settings = Preprocessing(**task["settings"])
        if task["step"] == "merge":
            yield from _merge_task(settings, task["column"])
        else:
            yield from _blocks_task(settings, task)
    except PersiaError as error:  # so that each engine reports it in the same way
        yield {"error": type(error).__name__, "message": str(error)}


def _blocks_task(settings: Preprocessing, task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    work, step = Path(settings.output) / _WORK, task["step"]
    first, end = task["first"], task["end"]
    # Blocks that an earlier run, or a lost attempt of this task, has finished. Blocks of one task are written
    # in order, so the first one without a marker is where the rest begins.
    for index in range(first, first + (1 << 40) if end is None else end):
        marker = work / step / f"{task['name']}-{index:06}.json"
        if not marker.exists():
            break
        yield (done := json.loads(marker.read_bytes()))
        first = index + 1
        if done["is_last"]:
            return
    if first == end:
        return
    vocabularies = None
    if step == "transform" and settings.needs_counts:
        vocabularies = [
            tsv_blocks.Vocabulary.open(work / "merge" / f"{column}", contiguous=settings.contiguous)
            for column in range(settings.num_categorical)
        ]
    for block in tsv_blocks.blocks_of(Path(task["file"]), settings.block_bytes, first, end):
        name = f"{task['name']}-{block.index:06}"
        parsed = tsv_blocks.parse(block.data, settings.num_numerical, settings.num_categorical)
        if step == "count":
            counts = tsv_blocks.count_ids(parsed)
            _write(work / step / f"{name}.counts", counts)
        elif len(parsed.labels):
            _write_table(settings, work / step / name, parsed, vocabularies)
        shared = {key: task[key] for key in ("file", "mapping")}
        result = shared | {"name": name, "index": block.index, "is_last": block.is_last}
        result |= {"bytes": block.file_bytes, "num_lines": parsed.num_lines, "num_rows": len(parsed.labels)}
        result |= {"num_bad": parsed.num_bad, "bad": parsed.bad[:_SHOWN]}
        _write(work / step / f"{name}.json", json.dumps(result).encode())
        yield result


def _merge_task(settings: Preprocessing, column: int) -> Iterator[dict[str, Any]]:
    """The IDs of one column that reach the limit, in order, by exact counts; IDs by frequency beside them.

    Ranges of IDs are merged one after the other, so that memory does not grow with the rows.
    """
    work = Path(settings.output) / _WORK
    result = {"bytes": 1, "num_bad": 0}
    target = work / "merge" / f"{column}"
    if target.with_suffix(".json").exists():
        yield result
        return
    parts = []
    for path in sorted((work / "count").glob("*.counts")):
        content: NDArray[np.uint64] = np.memmap(path, np.uint64, mode="r")
        ends = content[: settings.num_categorical + 1].astype(np.int64)
        keys = content[len(ends) : len(ends) + ends[-1]]
        counts = content[len(ends) + ends[-1] :]
        parts.append([array[ends[column] : ends[column + 1]] for array in (keys, counts)])
    # IDs are hashes, so equal ranges of them have about equally many.
    num_ranges = -(-sum(len(keys) for keys, _ in parts) // _MERGED_IDS) or 1
    bounds = [(index << 64) // num_ranges for index in range(1, num_ranges)]
    cuts = [np.searchsorted(keys, np.array(bounds, np.uint64)) for keys, _ in parts]
    frequent = []
    with open(target.with_suffix(".part"), "wb") as file:
        for index in range(num_ranges):
            pieces = []
            for (keys, counts), cut in zip(parts, cuts, strict=True):
                inside = slice(cut[index - 1] if index else 0, cut[index] if index < len(cut) else None)
                pieces.append((keys[inside], counts[inside]))
            every = np.concatenate([keys for keys, _ in pieces])
            order = np.argsort(every)
            distinct, begins = np.unique(every[order], return_index=True)
            occurring = np.concatenate([counts for _, counts in pieces])[order]
            occurring = np.add.reduceat(occurring, begins) if len(begins) else occurring
            kept = occurring >= max(settings.frequency_limit, 1)
            distinct[kept].tofile(file)
            if settings.contiguous:
                frequent.append(occurring[kept])
    if settings.contiguous:
        counts = np.concatenate(frequent)
        ids = np.empty(len(counts), np.int32)
        # Frequent ones first, equal counts in the order of hashes: the same IDs for any partitions.
        ids[np.argsort(~counts, kind="stable")] = np.arange(len(counts)) + tsv_blocks.RARE + 1
        _write(target.with_suffix(".ids"), ids)
    target.with_suffix(".part").replace(target.with_suffix(".keys"))
    _write(target.with_suffix(".json"), b"{}")
    yield result


def _write_table(
    settings: Preprocessing, path: Path, parsed: tsv_blocks.Parsed, vocabularies: list[Any] | None
) -> None:
    import pyarrow as pa

    table = tsv_blocks.transform(parsed, vocabularies, settings.log_offset)
    # Engines may run a task twice at a time (speculation): each attempt has a file of its own until the
    # rename.
    part = path.with_suffix(f".{os.getpid()}.part")
    if settings.format == "parquet":
        pa.parquet.write_table(table, part, compression="zstd")
    else:  # mapped into memory when the files are joined
        with pa.ipc.new_file(part, table.schema) as writer:
            writer.write_table(table)
    part.replace(path.with_suffix(".table"))


def _publish(settings: Preprocessing, mapping: str, names: list[str], mappings: list[str]) -> None:
    """Moves the finished tables of a mapping to where users expect them."""
    import pyarrow as pa

    output = Path(settings.output)
    tables = [output / _WORK / "transform" / f"{name}.table" for name in names]
    if settings.format == "parquet":
        (output / mapping).mkdir(exist_ok=True)
        for table in tables:
            target = output / mapping / f"{table.stem.partition('-')[2]}.parquet"
            if table.exists():  # else an earlier run has moved it
                table.replace(target)
        return
    spec = FeatureSpec.make(
        output, _cardinalities(settings), num_numerical=settings.num_numerical, mappings=mappings
    )
    with SplitBinaryWriter(spec, mapping) as writer:
        for path in tables:
            with pa.memory_map(str(path)) as mapped:
                for batch in pa.ipc.open_file(mapped).read_all().to_batches():
                    columns = [column.to_numpy() for column in batch.columns]
                    numerical = columns[1 : 1 + settings.num_numerical]
                    writer.write(
                        np.stack(numerical, axis=1) if numerical else None,
                        columns[1 + settings.num_numerical :],
                        columns[0],
                    )


def _cardinalities(settings: Preprocessing) -> list[int | None]:
    """Of each category; None: hashed."""
    if not settings.contiguous:
        return [None] * settings.num_categorical
    merged = Path(settings.output) / _WORK / "merge"
    sizes = [(merged / f"{column}.ids").stat().st_size for column in range(settings.num_categorical)]
    return [size // 4 + tsv_blocks.RARE + 1 for size in sizes]


def _checked_files(inputs: Mapping[str, Sequence[str | os.PathLike[str]]]) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for mapping, names in inputs.items():
        if not re.fullmatch(r"[A-Za-z0-9_]+", mapping):
            raise InvalidArgumentError(f"the mapping {mapping!r} must be letters, digits and underscores")
        if not names:
            raise InvalidArgumentError(f"{mapping!r} has no files: name at least one")
        paths = [Path(name).absolute() for name in names]
        # day_2 before day_10
        files[mapping] = sorted(
            paths,
            key=lambda path: [
                (int(text), "") if text.isdecimal() else (0, text) for text in re.split(r"(\d+)", str(path))
            ],
        )
        for path in paths:
            if not path.is_file():
                raise NotFoundError(f"there is no file {path} of {mapping!r}: correct the path, or copy it")
    return files


def _check_numbers(paths: Iterable[Path]) -> None:
    """NotFoundError: the files are numbered with a gap. A pattern would leave a missing day out silently."""
    numbered: dict[tuple[Path, str, str], dict[int, str]] = {}
    for path in paths:
        # Not the last part of a date, which has other gaps: 20240105, 2024-01-05, 2024_01_05.
        if found := re.fullmatch(r"(.*?)(?<!\d)(?<!\d[-_])(\d{1,3})(\D*)", path.name):
            numbered.setdefault((path.parent, found[1], found[3]), {})[int(found[2])] = found[2]
    for (folder, before, after), texts in numbered.items():
        for number, following in itertools.pairwise(sorted(texts)):
            if following > number + 1:
                # As padded as the one before it.
                missing = folder / f"{before}{number + 1:0{len(texts[number])}}{after}"
                raise NotFoundError(
                    f"there is no file {missing} between numbers {texts[number]} and "
                    f"{texts[following]}: copy it, or pass allow_gaps=True (--allow-gaps) to leave it out"
                )


def _begin(settings: Preprocessing, files: Mapping[str, list[Path]], work: Path) -> None:
    """Checks that the output is empty, or of an interrupted run of the same settings and files."""
    stats = {
        m: [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths] for m, paths in files.items()
    }
    wanted = json.dumps([_identity(settings), stats])
    run = work / "run.json"
    if run.exists():
        if run.read_text(encoding="utf-8") != wanted:
            raise FailedPreconditionError(
                f"{work} is of an interrupted run with other settings or files: repeat that call, remove the "
                "folder, or choose another output"
            )
    elif work.parent.exists() and any(path.name != _WORK for path in work.parent.iterdir()):
        raise FailedPreconditionError(f"{work.parent} is not empty: choose another output, or empty it")
    for step in ("count", "merge", "transform"):
        (work / step).mkdir(parents=True, exist_ok=True)
    _write(run, wanted.encode())


def _identity(settings: Preprocessing) -> dict[str, Any]:
    """The settings that decide the output's bytes."""
    return {key: value for key, value in asdict(settings).items() if key not in ("output", "max_bad_records")}


def _tasks(
    settings: Preprocessing, files: Mapping[str, list[Path]], step: str, partitions: int
) -> list[dict[str, Any]]:
    own = asdict(replace(settings, output=str(Path(settings.output).absolute())))
    base = {"settings": own, "step": step}
    if step == "merge":
        return [base | {"column": column, "bytes": 1} for column in range(settings.num_categorical)]
    if step == "count":  # what only a test set has must not become known
        files = {"train": files["train"]} if "train" in files else files
    total = sum(path.stat().st_size for paths in files.values() for path in paths)
    blocks_each = max(1, -(-total // (settings.block_bytes * partitions)))
    tasks = []
    for mapping, paths in files.items():
        for number, path in enumerate(paths):
            size = path.stat().st_size
            name = f"{mapping}-{number:04}-{re.sub(r'[^A-Za-z0-9_-]', '_', path.name.partition('.')[0])}"
            one = base | {"mapping": mapping, "file": str(path), "name": name}
            num_blocks = max(1, -(-size // settings.block_bytes))
            if path.suffix in (".gz", ".zst"):
                tasks.append(one | {"first": 0, "end": None, "bytes": size})
                continue
            for first in range(0, num_blocks, blocks_each):
                end = min(first + blocks_each, num_blocks)
                num_bytes = min(end * settings.block_bytes, size) - first * settings.block_bytes
                tasks.append(one | {"first": first, "end": end, "bytes": num_bytes})
    return tasks


def _bad(settings: Preprocessing, results: Sequence[dict[str, Any]]) -> list[str]:
    """The first bad records with file and line. Lines before a block are counted where no result has them."""
    known = {(one["file"], one["index"]): one["num_lines"] for one in results if "file" in one}
    shown: list[str] = []
    for one in sorted((one for one in results if one["num_bad"]), key=lambda one: str(one["name"])):
        if len(shown) >= _SHOWN:
            break
        before = 0
        for index in range(one["index"]):
            if (one["file"], index) not in known:
                (block,) = tsv_blocks.blocks_of(Path(one["file"]), settings.block_bytes, index, index + 1)
                known[one["file"], index] = block.data.count(b"\n")
            before += known[one["file"], index]
        shown += [f"{one['file']}:{before + line}: {reason}" for line, reason in one["bad"]]
    return shown[:_SHOWN]


def _write(path: Path, content: Any) -> None:
    """A whole file or none, also if two attempts of an engine write it at the same time."""
    part = Path(f"{path}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


def _kinds(kind: type[PersiaError]) -> Iterator[type[PersiaError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)
