"""The whole example in one command: data, cluster, training, evaluation, picture, summary.

    python demo.py                          with the copy of UCI Adult in this repository
    python demo.py --source DIR             with another copy, plain or .xz (or set ADULT_SOURCE)
    python demo.py --generate               with generated data of a known best AUC, which is not Adult

The processes are those of the Procfile at the top of the repository; everything written goes to build/demo.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from dataset import REPOSITORY, DataError, DatasetInfo, load_info
from honcho_job import Failure, run_procfile
from persia.utils import find_free_port
from plots import PUBLISHED_AUC, draw
from prepare_data import describe, prepare, prepared, source_from_environment
from reference import reference_auc
from results import remove_results
from settings import Settings

HERE = Path(__file__).resolve().parent
RUN_DEADLINE_S = 900.0  # Far above the usual minute; a job that hangs must still end.

console = Console(highlight=False)


def job_environment(output: Path) -> dict[str, str]:
    """What the Procfile and the example's scripts read, on top of the caller's environment."""
    port = find_free_port(10_000 + os.getpid() % 20_000)  # Two demos at a time start their search apart.
    # The network is small: threads of one operation would wait for each other longer than they compute.
    return (
        {"OMP_NUM_THREADS": "1"}
        | os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PERSIA_JOB_NAME": f"demo-{os.getpid()}-{time.time_ns()}",
            "PERSIA_NATS_PORT": str(port),
            "PERSIA_NATS_URL": f"nats://127.0.0.1:{port}",
            "PERSIA_GLOBAL_CONFIG": str(HERE / "config" / "global_config.yml"),
            "PERSIA_EMBEDDING_CONFIG": str(HERE / "config" / "embedding_config.yml"),
            "PERSIA_NN_WORKER_ENTRY": str(HERE / "train.py"),
            "PERSIA_DATALOADER_ENTRY": str(HERE / "data_loader.py"),
            "ADULT_DATA": str(output / "data"),
            "ADULT_OUTPUT": str(output),
            "PYTHONUNBUFFERED": "1",
        }
    )


def train(output: Path) -> dict[str, Any] | Failure:
    """Runs the cluster; the summary that train.py wrote, or what went wrong.

    `output` holds no results of an earlier run: its summary would pass for this one's.
    """
    summary = output / "summary.json"
    exit_code, follower = run_procfile(
        REPOSITORY / "Procfile", job_environment(output), RUN_DEADLINE_S, lambda line: print(line, flush=True)
    )
    if exit_code != 0 or not summary.is_file():
        return follower.failure(exit_code)
    content: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    return content


def finish(output: Path, summary: dict[str, Any], info: DatasetInfo) -> None:
    """Adds the picture and the reference to the summary, and shows it."""
    picture = output / "curves.png"
    draw(output / "history.jsonl", picture, info.dataset, info.best_auc)
    summary["reference_auc"] = reference_auc(output / "data", Settings.from_environment().seed)
    summary["paths"]["picture"] = str(picture)
    path = output / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    show(summary, info, path)


def show(summary: dict[str, Any], info: DatasetInfo, path: Path) -> None:
    """Comparable figures stand side by side: this run, plain PyTorch, and what is known to be reachable."""
    table = Table(title="adult income" if info.dataset == "adult" else "generated data (not Adult)")
    table.add_column("result")
    table.add_column("value", justify="right")
    table.add_row("test AUC, through the pipeline", f"{summary['test_auc']:.7f}")
    table.add_row("test AUC, plain PyTorch in one process", f"{summary['reference_auc']:.7f}")
    if info.best_auc is None:
        table.add_row("test AUC, published", f"{PUBLISHED_AUC:.7f}")
    else:
        table.add_row("test AUC, best possible (true probabilities)", f"{info.best_auc:.7f}")
    table.add_row("training samples per second", f"{summary['samples_per_second']:,.0f}")
    in_flight = f"{summary['max_staleness']} (bound: {summary['embedding_staleness']})"
    table.add_row("most batches in flight (lookup to acknowledged update)", in_flight)
    table.add_row("embeddings on the servers", f"{summary['num_embeddings']:,}")
    console.print(table)
    for name, written in {**summary["paths"], "summary": str(path)}.items():
        console.print(f"  {name:<15} {written}", soft_wrap=True)


def report(failure: Failure) -> None:
    """The reason again, below the shutdown messages that buried it."""
    errors = Console(stderr=True, highlight=False, markup=False)
    errors.rule("the demo failed")
    errors.print(f"{failure.process} ended first, with exit code {failure.exit_code}. Its last lines:")
    for line in failure.last_lines:
        errors.print(f"  {line}", soft_wrap=True)


def obtain(directory: Path, source: Path | None, generated: bool) -> DatasetInfo:
    """The data set in `directory`, prepared now unless an earlier run has done it; raises DataError."""
    if info := prepared(directory, source, generated):
        console.print(f"using the data prepared earlier; remove {directory} to start anew", soft_wrap=True)
        return info
    return prepare(directory, source, generated)


def run(output: Path, source: Path | None, generated: bool) -> int:
    start_s = time.monotonic()
    remove_results(output)
    try:
        info = obtain(output / "data", source, generated)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print(describe(info))
    result = train(output)
    if isinstance(result, Failure):
        report(result)
        return result.exit_code if 0 < result.exit_code < 256 else 1
    finish(output, result, load_info(output / "data"))
    console.print(f"done in {time.monotonic() - start_s:.0f} s")
    return 0


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=source_from_environment(), metavar="DIR")
    parser.add_argument("--generate", action="store_true", help="use generated data instead of Adult")
    parser.add_argument(
        "--checkpoint",
        metavar="LOCATION",
        help="go on from this checkpoint, such as the one that another --output has",
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build" / "demo", metavar="DIR")
    arguments = parser.parse_args()
    if arguments.checkpoint:
        is_url = "://" in arguments.checkpoint
        os.environ["ADULT_CHECKPOINT"] = (
            arguments.checkpoint if is_url else os.path.abspath(arguments.checkpoint)
        )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return run(arguments.output.resolve(), arguments.source, arguments.generate)
    except KeyboardInterrupt:
        print("\ninterrupted: every process of the job has been stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
