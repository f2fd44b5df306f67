"""`persia-launcher init`: writes a job to start from, for a Parquet file or for made-up clicks."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, cast

import click
import yaml

from persia.errors import FailedPreconditionError, InvalidArgumentError, PersiaError
from persia.launcher.options import option

_LABELS = (
    *("label", "click", "clicked", "is_click", "target", "y", "converted", "conversion", "is_clicked"),
    *("is_converted", "is_conversion"),
)
_LEAK = "may leak the label"
_DIM, _MAX_BATCH_SIZE = 16, 1024
_NUM_BATCHES = 100  # at least, so that a small file has steps enough to learn
_MADE_UP_ROWS = 20_000

_TRAIN = '''\
"""Trains a click model on Parquet files: `python train.py` in one process. README.md shows a cluster."""

from pathlib import Path

import torch

from persia import TrainCtx, optim
from persia.data import ParquetBatches
from persia.train import Trainer

HERE = Path(__file__).parent
FILES = {files}  # a file, a directory or a pattern
LABELS = {labels}  # 0 or 1
DENSE = {dense}  # numbers; a null is 0
IDS = {ids}  # integers, strings, or lists of them: slots of embedding_config.yml
DIM = {dim}  # of each slot there

train, valid = ParquetBatches(FILES, labels=LABELS, dense=DENSE, ids=IDS, batch_size={batch_size}).split(0.1)
trainer = Trainer(train, valid, directory=str(HERE / "checkpoints"), epochs=3, patience=2)


class Model(torch.nn.Module):
    """DLRM: dot products of all pairs of embeddings and of a vector made of the dense columns."""

    def __init__(self) -> None:
        super().__init__()
        count = len(IDS) + bool(DENSE)
        self.bottom = torch.nn.Linear(len(DENSE), DIM) if DENSE else None
        self.first, self.second = torch.triu_indices(count, count, offset=1)
        self.top = torch.nn.Sequential(
            torch.nn.Linear(count * DIM + len(self.first), 128),
            *(torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, len(LABELS))),
        )

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        if self.bottom is not None:
            embeddings = [self.bottom(dense[0].sign() * dense[0].abs().log1p()), *embeddings]
        vectors = torch.stack(embeddings, dim=1)  # [batch, count, DIM]
        dots = (vectors @ vectors.transpose(1, 2))[:, self.first, self.second]
        return self.top(torch.cat([vectors.flatten(1), dots], dim=1))  # a logit for each label


def main() -> None:
    model = Model()
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    slots = str(HERE / "embedding_config.yml")
    with TrainCtx(optim.Adagrad(lr=0.05), dense_optimizer, model=model, slots=slots) as ctx:
        trainer.fit(ctx)


if __name__ == "__main__":
    main()
'''

_LOADER = """\
from train import trainer  # a cluster runs this file as its data loaders

trainer.load()
"""

_README = """\
# A job to start from

`train.py` names the columns of the files at its top, and has the model. `embedding_config.yml` has a slot for
each ID column. Correct both where they are wrong.

In one process:

    python train.py

On a cluster of this machine, with two ranks and two parameter servers:

    persia-launcher local --nn-worker train.py --data-loader data_loader.py \\
        --embedding-config embedding_config.yml --nproc-per-node 2 --parameter-servers 2

Each run continues from the newest checkpoint in `checkpoints`. To start again, remove that directory.
"""


@click.command("init")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path("."))
@option(
    "--parquet",
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    help="Parquet file, or a directory of them, to train on. Without it, made-up clicks are written.",
)
@option(
    "--label", metavar="COLUMN", help="The column of 0 and 1. Default: one named label, click, target, ..."
)
def command(directory: Path, parquet: Path | None, label: str | None) -> None:
    """Write a job to start from into DIRECTORY: train.py, data_loader.py, embedding_config.yml, README.md.

    Columns of the file become labels, dense features and ID slots by their types. No file is overwritten.
    """
    made_up = directory / "clicks.parquet"
    names = ["train.py", "data_loader.py", "embedding_config.yml", "README.md"]
    names += [] if parquet else [made_up.name]
    if found := [name for name in names if (directory / name).exists()]:
        raise FailedPreconditionError(
            f"{directory} has {', '.join(found)} already: choose another directory, or remove them"
        )
    made_up_rows = None if parquet else _clicks()
    if made_up_rows is None:
        labels, dense, ids, left_out, num_rows = _roles(cast("Path", parquet), label)
        files = str(cast("Path", parquet).resolve())
        files = _text(files) if files.isprintable() else repr(files)
    else:
        labels, dense, ids, left_out = columns_of(made_up_rows.schema, label)
        files, num_rows = f'str(HERE / "{made_up.name}")', _MADE_UP_ROWS
    batch_size = min(_MAX_BATCH_SIZE, max(1, num_rows // _NUM_BATCHES))
    texts = job_files(files, labels, dense, ids, batch_size)
    # All has been read and checked: a run that fails before this line leaves no files behind.
    directory.mkdir(parents=True, exist_ok=True)
    if made_up_rows is not None:
        from pyarrow import parquet as pq  # of which the rows are

        pq.write_table(made_up_rows, made_up)
    for name, text in zip(names, texts, strict=False):
        (directory / name).write_text(text, encoding="utf-8")
    for role, columns in {"label": labels, "dense": dense, "ID": ids, "left out": left_out}.items():
        click.echo(f"{role + ':':<10}{', '.join(map(_shown, columns)) or '-'}")
    if any(column.endswith(f"({_LEAK})") for column in left_out):
        click.echo(
            f"Several columns have names of labels; {_shown(labels[0])} is taken. --label takes another."
        )
    train = shlex.quote(str(directory / "train.py"))
    click.echo(f"Correct the columns in {train} if they are wrong. Then: python {train}")


def job_files(
    files: str, labels: list[str], dense: list[str], ids: list[str], batch_size: int
) -> tuple[str, str, str, str]:
    """The contents of train.py, data_loader.py, embedding_config.yml and README.md."""
    columns = {"labels": _list(labels), "dense": _list(dense), "ids": _list(ids)}
    train = _TRAIN.format(files=files, **columns, dim=_DIM, batch_size=batch_size)
    # A slot of its own makes a group of its own; the default has room for 255.
    bits = f"feature_index_prefix_bit: {len(ids).bit_length()}\n" if len(ids) > 255 else ""
    slots = "".join(f"  {_text(name)}: {{dim: {_DIM}}}\n" for name in _ranges(ids))
    return train, _LOADER, f"{bits}slots_config:\n{slots}", _README


def columns_of(schema: Any, label: str | None) -> tuple[list[str], list[str], list[str], list[str]]:
    """(labels, dense columns, ID columns, others) of an Arrow schema.

    Raises InvalidArgumentError if there is no label, no ID column, or no column `label`.
    """
    from pyarrow import types

    def is_id(kind: Any) -> bool:
        texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
        return types.is_integer(kind) or any(is_text(kind) for is_text in texts)

    def is_label(kind: Any) -> bool:
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))

    if label is not None and label not in schema.names:
        raise InvalidArgumentError(f"--label {label}: the file has {', '.join(schema.names)}")
    label_like = [name for name in schema.names if name.lower() in _LABELS]
    if label is None:
        usable = [name for name in label_like if is_label(schema.field(name).type)]
        label = min(usable, key=lambda name: _LABELS.index(name.lower()), default=None)
    if label is None:
        raise InvalidArgumentError(
            f"no column of numbers or bools has the name of a label ({', '.join(_LABELS)}): name it with "
            f"--label; the file has {', '.join(schema.names)}"
        )
    dense, ids, others = [], [], []
    for column in schema:
        value = getattr(column.type, "value_type", column.type)  # of lists and of dictionaries
        if column.name == label:
            continue
        if column.name in label_like:
            others.append(f"{column.name} ({_LEAK})")
        elif is_id(value) and not _can_be_slot(column.name):
            others.append(f"{_shown(column.name)} (embedding_config.yml cannot have this name: rename it)")
        elif is_id(value):
            ids.append(column.name)
        elif types.is_floating(column.type) or types.is_boolean(column.type):
            dense.append(column.name)
        else:
            others.append(f"{column.name} ({column.type})")
    if not ids:
        raise InvalidArgumentError("no column has integers or strings: a job needs at least one ID column")
    return [label], dense, ids, others


def _can_be_slot(name: str) -> bool:
    """Whether the name can be written into the slots file, and is read back as one slot of this name."""
    from persia.config import parse_embedding_config  # not for --help

    if not name or re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", name):
        return False
    try:
        config = parse_embedding_config(yaml.safe_load(f"slots_config: {{{_text(name)}: {{dim: 1}}}}"))
    except (PersiaError, yaml.YAMLError):
        return False
    return list(config.slots_config) == [name]


def _ranges(names: list[str]) -> list[str]:
    """Names with runs such as C1, C2, C3 as `C{1..3}`."""
    found: list[str] = []
    runs: list[tuple[str, int, int] | None] = []  # prefix, first and last number of each entry of `found`
    for name in names:
        match = re.fullmatch(r"(.*?)(0|[1-9][0-9]*)", name)
        prefix, number = (match[1], int(match[2])) if match else (name, -1)
        if match and runs and runs[-1] is not None and (runs[-1][0], runs[-1][2] + 1) == (prefix, number):
            runs[-1] = prefix, runs[-1][1], number
            found[-1] = f"{prefix}{{{runs[-1][1]}..{number}}}"
        else:
            runs.append((prefix, number, number) if match else None)
            found.append(name)
    return found


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a string of Python and of YAML alike


def _shown(name: str) -> str:
    return name if name and name.isprintable() else repr(name)


def _list(names: list[str]) -> str:
    ranges = _ranges(names)
    run = re.fullmatch(r"(\w+)\{(\d+)\.\.(\d+)\}", ranges[0]) if len(ranges) == 1 < len(names) else None
    if run is not None:
        return f'[f"{run[1]}{{i}}" for i in range({run[2]}, {int(run[3]) + 1})]'
    items = [_text(name) for name in names]
    if len(line := f"[{', '.join(items)}]") <= 60:
        return line
    lines = [""]
    for item in items:
        if lines[-1] and len(lines[-1]) + len(item) > 98:
            lines.append("")
        lines[-1] += f" {item}," if lines[-1] else f"{item},"
    return "[\n" + "".join(f"    {line}\n" for line in lines) + "]"


def _roles(path: Path, label: str | None) -> tuple[list[str], list[str], list[str], list[str], int]:
    """The columns of the files as `columns_of` has them, and the number of rows. Checks the files."""
    from persia.data.parquet import ParquetBatches, open_files

    data = open_files(path)
    labels, dense, ids, left_out = columns_of(data.schema, label)
    num_rows = len(ParquetBatches(path, labels=labels, dense=dense, ids=ids, batch_size=1))
    values = data.head(10_000, columns=labels)[labels[0]].unique().to_pylist()
    if wrong := [value for value in values if value not in (0, 1)]:
        raise InvalidArgumentError(
            f"label column {labels[0]!r} has values such as {wrong[0]}: it must be 0 or 1, without nulls; "
            "name another column with --label, or change it in the files"
        )
    return labels, dense, ids, left_out, num_rows


def _clicks() -> Any:
    """Made-up clicks. Users with an even ID and items whose ID is a multiple of 3 have more of them."""
    import numpy as np

    from persia.data.parquet import require_pyarrow

    random = np.random.default_rng(0)
    user, item = random.integers(200, size=_MADE_UP_ROWS), random.integers(50, size=_MADE_UP_ROWS)
    price = random.lognormal(size=_MADE_UP_ROWS)
    logit = np.where(user % 2 == 0, 1.5, -1.5) + np.where(item % 3 == 0, 1.0, -0.5) - 0.3 * price
    columns = {
        "click": (random.random(_MADE_UP_ROWS) < 1 / (1 + np.exp(-logit))).astype(np.int8),
        "price": price,
        "hour": random.integers(24, size=_MADE_UP_ROWS).astype(np.float32),
        "user": user,
        "item": item,
        "country": random.choice(["cn", "de", "us"], size=_MADE_UP_ROWS),
    }
    return require_pyarrow().table(columns)
