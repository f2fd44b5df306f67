"""`persia-launcher init`: writes a job to start from, for a Parquet file or for made-up clicks."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import click

from persia.errors import FailedPreconditionError, InvalidArgumentError
from persia.launcher.options import option

_LABELS = ("label", "click", "clicked", "is_click", "target", "y", "converted", "conversion", "is_clicked")
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
    directory.mkdir(parents=True, exist_ok=True)
    if parquet is None:
        _write_clicks(made_up)
    schema, num_rows = _read_schema(parquet or made_up)
    labels, dense, ids, left_out = columns_of(schema, label)
    files = (
        f"str(HERE / {made_up.name!r})".replace("'", '"')
        if parquet is None
        else _text(str(parquet.resolve()))
    )
    batch_size = min(_MAX_BATCH_SIZE, max(1, num_rows // _NUM_BATCHES))
    for name, text in zip(names, job_files(files, labels, dense, ids, batch_size), strict=False):
        (directory / name).write_text(text, encoding="utf-8")
    for role, columns in {"label": labels, "dense": dense, "ID": ids, "left out": left_out}.items():
        click.echo(f"{role + ':':<10}{', '.join(columns) or '-'}")
    click.echo(
        f"Correct the columns in {directory / 'train.py'} if they are wrong. Then: python "
        f"{directory / 'train.py'}"
    )


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

    by_name = {name.lower(): name for name in schema.names}
    if label is not None and label not in schema.names:
        raise InvalidArgumentError(f"--label {label}: the file has {', '.join(schema.names)}")
    label = label or next((by_name[name] for name in _LABELS if name in by_name), None)
    if label is None:
        raise InvalidArgumentError(
            f"no column has the name of a label ({', '.join(_LABELS)}): name it with --label; the file has "
            f"{', '.join(schema.names)}"
        )
    dense, ids, others = [], [], []
    for column in schema:
        value = getattr(column.type, "value_type", column.type)  # of lists and of dictionaries
        if column.name == label:
            continue
        if is_id(value):
            ids.append(column.name)
        elif types.is_floating(column.type) or types.is_boolean(column.type):
            dense.append(column.name)
        else:
            others.append(f"{column.name} ({column.type})")
    if not ids:
        raise InvalidArgumentError("no column has integers or strings: a job needs at least one ID column")
    return [label], dense, ids, others


def _ranges(names: list[str]) -> list[str]:
    """Names with runs such as C1, C2, C3 as `C{1..3}`."""
    found: list[str] = []
    runs: list[tuple[str, int, int] | None] = []  # prefix, first and last number of each entry of `found`
    for name in names:
        match = re.fullmatch(r"(.*?)(0|[1-9]\d*)", name)
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


def _list(names: list[str]) -> str:
    run = re.fullmatch(r"(\w+)\{(\d+)\.\.(\d+)\}", _ranges(names)[0]) if len(_ranges(names)) == 1 else None
    if run is not None:
        return f'[f"{run[1]}{{i}}" for i in range({run[2]}, {int(run[3]) + 1})]'
    line = f"[{', '.join(map(_text, names))}]"
    if len(line) <= 60:
        return line
    wrapped = textwrap.fill(line[1:-1] + ",", 100, break_long_words=False, break_on_hyphens=False)
    return "[\n" + textwrap.indent(wrapped, "    ") + "\n]"


def _read_schema(path: Path) -> tuple[Any, int]:
    data = _pyarrow().dataset.dataset(path, format="parquet")
    return data.schema, data.count_rows()


def _write_clicks(path: Path) -> None:
    """Users with an even ID click more often, and so are items whose ID is a multiple of 3."""
    import numpy as np

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
    pyarrow = _pyarrow()
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _pyarrow() -> Any:
    try:
        import pyarrow.dataset
        import pyarrow.parquet
    except ImportError as error:
        raise FailedPreconditionError(
            f"Parquet files need pyarrow, which cannot be imported ({error}): pip install 'persia[arrow]'"
        ) from error
    return pyarrow
