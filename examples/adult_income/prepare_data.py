"""Turns the UCI Adult files into the `.npz` files that the example trains from.

python prepare_data.py                  download from the public home, verified and cached
python prepare_data.py --source DIR     a local copy, plain or .xz (or set ADULT_SOURCE)
python prepare_data.py --generate       no copy, no network: a generated data set, never called Adult
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from adult import FILES, HOME_URL, encode, parse, read_source, verify
from dataset import DEFAULT_DIRECTORY, DataError, DatasetInfo, load_info, load_split, save_dataset
from download import DownloadError, fetch
from generated import generate


def prepare(output: Path, source: Path | None, generated: bool, home_url: str = HOME_URL) -> DatasetInfo:
    """Writes train.npz, test.npz and dataset.json into `output`; raises DataError."""
    if generated:
        info, train, test = generate()
    else:
        tables = [parse(*_read(name, source, output / "raw", home_url)) for name in FILES]
        info, train, test = encode(*tables)
    save_dataset(output, info, train, test)
    return info


def prepared(output: Path, source: Path | None, generated: bool) -> DatasetInfo | None:
    """What an earlier run left in `output`, when it is what is asked for; None: it must be prepared.

    A local copy that was named is always read again, as it may be another one, or have changed.
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


def _read(name: str, source: Path | None, cache: Path, home_url: str) -> tuple[bytes, str]:
    """Content and origin; either way the checksum decides whether this is Adult."""
    if source is None:
        return fetch(name, home_url, cache), home_url + name
    content, origin = read_source(source, name), str(source / name)
    verify(name, content, origin)
    return content, origin


def describe(info: DatasetInfo) -> str:
    """One line for people, which never calls generated data Adult."""
    rows = f"{info.train_rows:,} training and {info.test_rows:,} test rows"
    if info.dataset == "adult":
        return f"UCI Adult: {rows}"
    return f"Generated data (not Adult): {rows}; best AUC, from the true probabilities: {info.best_auc:.4f}"


def source_from_environment() -> Path | None:
    """ADULT_SOURCE as a path; unset and empty both mean: download."""
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
        if isinstance(error, DownloadError):
            print(
                "Without a network, give a folder with adult.data and adult.test, plain or .xz:\n"
                "  --source DIR, or ADULT_SOURCE=DIR in the environment\n"
                "Without either, generate a data set with a known best AUC, which is not Adult:\n"
                "  --generate",
                file=sys.stderr,
            )
        return 1
    print(f"{describe(info)}\nwritten to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
