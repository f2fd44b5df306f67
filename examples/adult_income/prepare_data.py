"""Turns the UCI Adult files into the `.npz` files that the example trains from.

python prepare_data.py                  the copy in this repository
python prepare_data.py --source DIR     another copy, plain or .xz (or set ADULT_SOURCE)
python prepare_data.py --generate       a generated data set, never called Adult
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from adult import BUNDLED, FILES, encode, parse, read_source, verify
from dataset import DEFAULT_DIRECTORY, DataError, DatasetInfo, load_info, load_split, save_dataset
from generated import generate


def prepare(output: Path, source: Path | None, generated: bool) -> DatasetInfo:
    """Writes train.npz, test.npz and dataset.json into `output`; raises DataError.

    `source` is a folder with the UCI files; None takes those of this repository.
    """
    if generated:
        info, train, test = generate()
    else:
        info, train, test = encode(*(parse(*_read(name, source or BUNDLED)) for name in FILES))
    save_dataset(output, info, train, test)
    return info


def prepared(output: Path, source: Path | None, generated: bool) -> DatasetInfo | None:
    """What an earlier run left in `output`, when it is what is asked for; None: it must be prepared.

    A copy that was named is always read again, as it may be another one, or have changed.
    """
    if source is not None and not generated:
        return None
    try:
        info = load_info(output)
        lengths = (len(load_split(output, "train")), len(load_split(output, "test")))
    except DataError:
        return None
    wanted = "generated" if generated else "adult"
    return info if info.dataset == wanted and lengths == (info.train_rows, info.test_rows) else None


def ensure_prepared(output: Path) -> None:
    """Prepares Adult into `output` unless data is there already; raises DataError."""
    try:
        load_info(output)
    except DataError:
        print(describe(prepare(output, source_from_environment(), generated=False)), flush=True)


def _read(name: str, source: Path) -> tuple[bytes, str]:
    """Content and origin; the checksum decides whether this is Adult."""
    content, origin = read_source(source, name), str(source / name)
    verify(name, content, origin)
    return content, origin


def describe(info: DatasetInfo) -> str:
    """One line for people, which never calls generated data Adult."""
    rows = f"{info.train_rows:,} training and {info.test_rows:,} test rows"
    if info.dataset == "adult":
        return f"UCI Adult: {rows}"
    return (
        f"Generated data (not Adult): {rows}; best AUC, from the true probabilities: {info.best_auc:.4f}; "
        "a trained model comes within 0.02 of it"
    )


def source_from_environment() -> Path | None:
    """ADULT_SOURCE as a path; unset and empty both mean the copy in this repository."""
    value = os.environ.get("ADULT_SOURCE")
    return Path(value) if value else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=source_from_environment(), metavar="DIR")
    parser.add_argument("--generate", action="store_true", help="generate data instead of using Adult")
    parser.add_argument("--output", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR")
    arguments = parser.parse_args()
    try:
        info = prepare(arguments.output, arguments.source, arguments.generate)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{describe(info)}\nwritten to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
