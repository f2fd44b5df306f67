"""The whole example in one command: data, training in one process, the same on a cluster, table, picture.

    python demo.py                          with the copy of UCI Adult in this repository
    python demo.py --source DIR             with another copy, plain or .xz (or set ADULT_SOURCE)
    python demo.py --generate               with generated data of a known best AUC, which is not Adult

The cluster's processes are those of the Procfile at the top of the repository. Everything written goes to
build/demo.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from dataset import REPOSITORY, DataError, DatasetInfo, load_info
from honcho_job import TAIL_LINES, Failure, run_procfile
from monitor import step_bar
from persia.utils import find_free_port
from prepare_data import describe, prepare, prepared, source_from_environment
from results import remove_results
from settings import Settings, SettingsError

HERE = Path(__file__).resolve().parent
RUN_DEADLINE_S = 900.0  # Far above the usual minute; a job that hangs must still end.
STEP = re.compile(r".*\| step (?P<step>\d+)/(?P<steps>\d+)  (?P<text>loss .*)")
# What a start always says, and no reader of the demo needs; its log has it.
CHATTER = re.compile(r".*(nats\.1 *\| .*\[(INF|WRN)\] |\| .* audit: ).*")
PROCESSES = (
    "a broker, two parameter servers, an embedding worker, a data loader, and the training script (Procfile)"
)

console = Console(highlight=False)


def environment(output: Path, **more: str) -> dict[str, str]:
    """What both ways of training read, on top of the caller's environment."""
    # The network is small: threads of one operation would wait for each other longer than they compute.
    return (
        {"OMP_NUM_THREADS": "1"}
        | {name: value for name, value in os.environ.items() if name != "PERSIA_NATS_URL"}
        | {"PERSIA_EMBEDDING_CONFIG": str(HERE / "config" / "embedding_config.yml")}
        | {"ADULT_OUTPUT": str(output), "PYTHONUNBUFFERED": "1"}
        | more
    )


def cluster_environment(output: Path) -> dict[str, str]:
    """What the Procfile reads, too."""
    port = find_free_port(10_000 + os.getpid() % 20_000)  # Two demos at a time start their search apart.
    return environment(
        output,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        PERSIA_JOB_NAME=f"demo-{os.getpid()}-{time.time_ns()}",
        PERSIA_NATS_PORT=str(port),
        PERSIA_NATS_URL=f"nats://127.0.0.1:{port}",
        PERSIA_GLOBAL_CONFIG=str(HERE / "config" / "global_config.yml"),
        PERSIA_NN_WORKER_ENTRY=str(HERE / "train.py"),
        PERSIA_DATALOADER_ENTRY=str(HERE / "data_loader.py"),
        ADULT_DATA=str(output / "data"),
    )


def summary_of(output: Path, start_s: float) -> dict[str, Any]:
    """The summary that train.py wrote, with the seconds since `start_s`."""
    content: dict[str, Any] = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    return content | {"seconds": time.monotonic() - start_s}


def train_alone(output: Path, data: Path) -> dict[str, Any] | Failure:
    """Runs train.py in one process, which shows its progress; what it logs goes to a file beside its results.

    That process is a fork of this one: most of the time goes to importing torch, which both need. With
    CUDA it is a new one: CUDA works in no fork of a process that has used it.
    """
    start_s = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    log = output / "train.log"
    variables = environment(output, ADULT_DATA=str(data))
    exit_code = (_in_new_process if import_torch() else _in_fork)(variables, log)
    if exit_code == 0:
        return summary_of(output, start_s)
    last_lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return Failure(process="train.py", exit_code=exit_code, last_lines=last_lines)


def _in_new_process(variables: dict[str, str], log: Path) -> int:
    with log.open("w", encoding="utf-8") as errors:
        # A session of its own keeps the terminal's Ctrl-C from it: this process ends it, and says so.
        return subprocess.run(
            [sys.executable, str(HERE / "train.py")],
            env=variables,
            stderr=errors,
            timeout=RUN_DEADLINE_S,
            start_new_session=True,
            check=False,
        ).returncode


def _in_fork(variables: dict[str, str], log: Path) -> int:
    process = multiprocessing.get_context("fork").Process(target=_run_train, args=(variables, log))
    process.start()
    try:
        import_matplotlib()
        process.join(RUN_DEADLINE_S)
        if process.is_alive():
            raise subprocess.TimeoutExpired("train.py", RUN_DEADLINE_S)
    finally:
        process.kill()  # does nothing when it has ended
        process.join()
    return 1 if process.exitcode is None else process.exitcode


def _run_train(variables: dict[str, str], log: Path) -> None:
    """The child of _in_fork."""
    os.setsid()  # keeps the terminal's Ctrl-C from it: the parent ends it, and says so
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with log.open("w", encoding="utf-8") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(variables)
    runpy.run_path(str(HERE / "train.py"), run_name="__main__")


def train_on_cluster(output: Path) -> dict[str, Any] | Failure:
    """Runs the processes of the Procfile until training ends.

    `output` holds no results of an earlier run: its summary would pass for this one's.
    """
    start_s = time.monotonic()
    with shown(output / "cluster.log") as show:
        exit_code, follower = run_procfile(
            REPOSITORY / "Procfile", cluster_environment(output), RUN_DEADLINE_S, show
        )
    if exit_code != 0 or not (output / "summary.json").is_file():
        return follower.failure(exit_code)
    return summary_of(output, start_s)


@contextmanager
def shown(log: Path) -> Iterator[Callable[[str], None]]:
    """Yields a function that takes the cluster's lines: a terminal gets a progress bar, others most lines."""
    bar = step_bar()
    task = bar.add_task("starting the processes", total=None) if bar else None
    with log.open("w", encoding="utf-8") as file, bar or nullcontext():

        def show(line: str) -> None:
            print(line, file=file, flush=True)
            if bar is None or task is None:
                if not CHATTER.fullmatch(line):
                    print(line, flush=True)
            elif match := STEP.fullmatch(line):
                steps = int(match["steps"])
                bar.update(task, completed=int(match["step"]), total=steps, description=match["text"])

        yield show


def import_torch() -> bool:
    """Imports what train.py needs, and returns whether that uses CUDA.

    The garbage collector is off meanwhile: it would scan all that is imported, and find nothing to free.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looks for CUDA without beginning to use it
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as both ways have; torch reads it when it is imported
    gc.disable()
    import torch

    import reference  # noqa: F401
    import train  # noqa: F401

    # The first step of a process imports torch's compiler.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    gc.freeze()
    gc.enable()
    try:
        is_enabled = Settings.from_environment().enable_cuda
    except SettingsError:  # train.py reads the same settings, and its error is shown
        return False
    return is_enabled and torch.cuda.is_available()


def import_matplotlib() -> None:
    """Imports what `finish` needs besides, while train.py runs."""
    import plots  # noqa: F401


def finish(output: Path, alone: dict[str, Any], summary: dict[str, Any], info: DatasetInfo) -> None:
    """Adds the picture and the reference to the summary, and shows both."""
    from plots import draw
    from reference import trained

    picture = output / "curves.png"
    draw(output / "history.jsonl", picture, info.dataset, info.best_auc)
    names = ("test_auc", "samples_per_second", "max_staleness", "num_embeddings", "seconds")
    summary["one_process"] = {name: alone[name] for name in names}
    start_s = time.monotonic()
    auc, rate = trained(output / "data", Settings.from_environment().seed)
    summary["reference_auc"] = auc
    summary["paths"]["picture"] = str(picture)
    path = output / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plain = {"test_auc": auc, "samples_per_second": rate, "seconds": time.monotonic() - start_s}
    show_table({"one process": alone, "local cluster": summary, "plain PyTorch": plain}, info)
    for name, written in {**summary["paths"], "summary": str(path)}.items():
        console.print(f"  {name:<12} {written}", soft_wrap=True, style="bold" if name == "picture" else "")


def show_table(ways: dict[str, dict[str, Any]], info: DatasetInfo) -> None:
    """Comparable figures stand side by side: each way of training, and what is known to be reachable."""
    from plots import PUBLISHED_AUC

    known, auc = ("published", PUBLISHED_AUC) if info.best_auc is None else ("best possible", info.best_auc)
    table = Table(title="adult income" if info.dataset == "adult" else "generated data (not Adult)")
    table.add_column("")
    for name in (*ways, known):
        table.add_column(name, justify="right")

    def add(what: str, name: str, form: str, last: str = "") -> None:
        values = [format(way[name], form) if name in way else "" for way in ways.values()]
        table.add_row(what, *values, last)

    add("test AUC", "test_auc", ".5f", f"{auc:.5f}")
    add("samples per second", "samples_per_second", ",.0f")
    add("batches in flight", "max_staleness", "d")
    add("embedding rows", "num_embeddings", ",d")
    add("seconds in all", "seconds", ".1f")
    console.print(table)


def report(failure: Failure) -> int:
    """Shows the reason, below the shutdown messages that buried it; returns the demo's exit code."""
    errors = Console(stderr=True, highlight=False, markup=False)
    errors.rule("the demo failed")
    errors.print(f"{failure.process} ended first, with exit code {failure.exit_code}. Its last lines:")
    for line in failure.last_lines:
        errors.print(f"  {line}", soft_wrap=True)
    return failure.exit_code if 0 < failure.exit_code < 256 else 1


def obtain(directory: Path, source: Path | None, generated: bool) -> DatasetInfo:
    """The data set in `directory`, prepared now unless an earlier run has done it; raises DataError."""
    if info := prepared(directory, source, generated):
        console.print(f"using the data prepared earlier; remove {directory} to start anew", soft_wrap=True)
        return info
    return prepare(directory, source, generated)


def step(text: str) -> None:
    """Says what comes next, before a process that writes to the same terminal."""
    console.print(f"\n==> {text}", style="bold", soft_wrap=True)
    sys.stdout.flush()


def run(output: Path, source: Path | None, generated: bool) -> int:
    start_s = time.monotonic()
    alone = output / "one_process"
    remove_results(output)
    remove_results(alone)
    try:
        info = obtain(output / "data", source, generated)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print(describe(info), soft_wrap=True)
    step("Training in one process: python examples/adult_income/train.py")
    first = train_alone(alone, output / "data")
    if isinstance(first, Failure):
        return report(first)
    step(f"The same script on a cluster of this machine: {PROCESSES}")
    second = train_on_cluster(output)
    if isinstance(second, Failure):
        return report(second)
    step("The same training in plain PyTorch, and a picture of the cluster's run")
    finish(output, first, second, load_info(output / "data"))
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
    except subprocess.TimeoutExpired as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
