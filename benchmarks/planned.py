"""What `persia-launcher plan` predicts beside what a job of the Criteo recipe needs.

    python -m benchmarks.role_costs --output constants.yaml
    python -m benchmarks.planned --constants constants.yaml
    python -m benchmarks.planned --constants constants.yaml --servers 0    # in one process

Clicks in files, which are made up before; all roles on the cores of this machine that the command may use.
Counts between two moments of the training, without its start. Exits with 1 if rows, memory, bytes or
samples/s differ by more than a fifth.

Samples/s are those of a job to which no other work takes cores. On a machine with other work, let constants
and jobs be the first on one core:

    chrt -r 5 taskset -c 1 python -m benchmarks.planned --constants constants.yaml
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.role_costs import process_seconds
from persia.data import SyntheticClicks
from persia.launcher.supervisor import ManagedProcess
from persia.messaging.discovery import Directory
from persia.messaging.subjects import NN_WORKER
from persia.observability.status import ProcessStatus, find_processes, job_status
from persia.testing import LocalCluster

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "criteo"
ROLES = {
    "nn-worker": "ranks",
    "data-loader": "data_loaders",
    "embedding-worker": "embedding_workers",
    "embedding-parameter-server": "parameter_servers",
}
TOLERANCE, WARM_UP, TIMEOUT_S = 0.2, 20, 1200.0
_EVALUATED = 256  # clicks of an evaluation


def snapshot(statuses: list[ProcessStatus], nats: int) -> dict[str, float]:
    """Counts so far, by role."""
    counts = {"time": time.monotonic(), "trained": 0.0, "cpu broker": process_seconds(nats)}
    for status in statuses:
        assert status.values is not None, status.error
        role, stats = ROLES[status.info.role], status.values["stats"]
        counts[f"cpu {role}"] = counts.get(f"cpu {role}", 0) + process_seconds(status.info.pid)
        counts["trained"] += stats.get("batches_trained", 0)
        for name in ("rpc_num_received_bytes", "rpc_num_sent_bytes"):
            counts[f"{role} {name}"] = counts.get(f"{role} {name}", 0) + stats.get(name, 0)
    return counts


def snapshots(cluster: LocalCluster, rank: ManagedProcess, at: tuple[int, int]) -> list[dict[str, float]]:
    """At two numbers of trained batches."""
    nats = next(process.pid for process in cluster.processes if process.name == "nats")
    taken: list[dict[str, float]] = []
    while rank.exit_code is None and len(taken) < len(at):
        time.sleep(0.5)
        # Of the rank alone: questions take time of the processes that are asked.
        found = job_status(Directory(cluster.session).present(NN_WORKER, 0.4))
        trained = [one.values["stats"]["batches_trained"] for one in found if one.values is not None]
        if not trained or trained[0] < at[len(taken)]:
            continue
        taken.append(snapshot(job_status(find_processes(cluster.session)), nats))
    return taken


def measure(words: list[str], batches: int, servers: int, slots: dict[str, Any]) -> dict[str, float]:
    """Of a batch, and memory of a server at the end."""
    with LocalCluster(
        embedding_config=slots, parameter_servers=servers, env={"OMP_NUM_THREADS": "1"}
    ) as cluster:
        cluster.start_loader(EXAMPLE / "data_loader.py", *words)
        rank = cluster.start_nn_worker(EXAMPLE / "train.py", *words)
        seen = snapshots(cluster, rank, (WARM_UP, batches * 4 // 5))
        if cluster.wait(rank, TIMEOUT_S) or len(seen) < 2:
            raise RuntimeError(rank.output)
        held = [
            status.values
            for status in job_status(find_processes(cluster.session))
            if status.info.role == "embedding-parameter-server" and status.values is not None
        ]
    first, last = seen
    trained = last["trained"] - first["trained"]
    found = {name: (last[name] - first[name]) / trained for name in first}
    found["rows"] = sum(values["stats"]["num_rows"] for values in held)
    found["memory"] = max(values["resident_bytes"] for values in held)
    return found


def predict(flags: dict[str, Any], samples: int, servers: int, folder: Path, constants: str | None) -> Any:
    """The plan for the flags of the recipe, as its command prints it."""
    cores = float(len(os.sched_getaffinity(0)))
    hosts = {
        "machine": {"cores": cores, "memory_gib": 16.0},
        "parameter_servers": {"count": max(servers, 1)},
    }
    (folder / "hosts.yaml").write_text(yaml.safe_dump(hosts), encoding="utf-8")
    options = {
        "--feature-spec": folder,
        "--sample": folder,
        "--hosts": folder / "hosts.yaml",
        "--batch-size": flags["--batch_size"],
        "--dim": flags["--embedding_dim"],
        "--optimizer": flags["--optimizer"],
        "--bottom-mlp-sizes": flags["--bottom_mlp_sizes"],
        "--top-mlp-sizes": flags["--top_mlp_sizes"],
        "--embedding-staleness": flags["--embedding_staleness"],
        "--samples": samples,
        **({"--constants": constants} if constants else {}),
    }
    command = [sys.executable, "-m", "persia.launcher", "plan", "--json"]
    command += [str(word) for pair in options.items() for word in pair]
    command += [] if servers else ["--in-process"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure_process(words: list[str]) -> dict[str, float]:
    """Processor time of a batch, and batches a second, of a job in one process."""
    command = [sys.executable, str(EXAMPLE / "train.py"), *words]
    seen = []
    with subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"step (\d+): auc", line):
                seen.append((int(found[1]), process_seconds(process.pid), time.monotonic()))
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    first, last = seen[0], seen[-1]
    steps = last[0] - first[0]
    return {"cpu one_process": (last[1] - first[1]) / steps, "time": (last[2] - first[2]) / steps}


def rows(plan: Any, found: dict[str, float], batch_size: int) -> Iterator[tuple[str, float, float, bool]]:
    """(figure, predicted, measured, whether a difference is a failure)."""
    roles = plan["roles"]
    if "memory" in found:
        yield "rows", plan["num_rows"], found["rows"], True
        memory = roles["parameter_servers"]["memory_bytes"]
        yield "memory of a server, MiB", memory / 2**20, found["memory"] / 2**20, True
        moved = plan["traffic"]
        for hop, role, name in (
            (("lookups", "updates"), "parameter_servers", "rpc_num_received_bytes"),
            (("rows",), "parameter_servers", "rpc_num_sent_bytes"),
            (("gradients",), "embedding_workers", "rpc_num_received_bytes"),
            (("embeddings",), "embedding_workers", "rpc_num_sent_bytes"),
        ):
            bytes_moved = sum(moved[part] for part in hop)
            yield f"{' and '.join(hop)}, kB", bytes_moved / 1e3, found[f"{role} {name}"] / 1e3, True
    for name in roles:
        yield f"{name}: processor ms", roles[name]["cpu_s"] * 1e3, found[f"cpu {name}"] * 1e3, False
    used = sum(found[f"cpu {name}"] for name in roles)
    predicted = sum(role["cpu_s"] for role in roles.values())
    yield "samples for a second of a processor", batch_size / predicted, batch_size / used, False
    yield "samples/s", plan["samples_per_s"], batch_size / found["time"], True


@click.command(help=__doc__)
@click.option("--constants", help="Of benchmarks.role_costs; default: the planner's own.")
@click.option("--servers", type=click.IntRange(min=0), default=2, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option("--batches", type=click.IntRange(min=100), default=400, show_default=True)
@click.option("--dim", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--optimizer", default="adam", show_default=True)
@click.option("--multi-hot", is_flag=True, help="Slots of 1, 5 and 20 IDs a sample, in turns.")
@click.option("--staleness", type=click.IntRange(min=1), default=8, show_default=True)
def main(
    constants: str | None,
    servers: int,
    batch_size: int,
    batches: int,
    dim: int,
    optimizer: str,
    multi_hot: bool,
    staleness: int,
) -> None:
    flags = {
        "--batch_size": batch_size,
        "--embedding_dim": dim,
        "--optimizer": optimizer,
        "--bottom_mlp_sizes": f"32,{dim}",
        "--top_mlp_sizes": "64,32,1",
        "--test_batch_size": _EVALUATED,
        # In a cluster one evaluation at the end, behind the second moment.
        "--evals_per_epoch": 1 if servers else 5,
        "--embedding_staleness": staleness,
        "--lr": 0.001,
    }
    hotness = [(1, 5, 20)[slot % 3] for slot in range(26)] if multi_hot else None
    made = partial(SyntheticClicks, hotness=hotness)
    with tempfile.TemporaryDirectory() as folder:
        train = made(num_batches=batches, batch_size=batch_size, seed=1)
        train.spec(folder).save()
        train.write_split_binary(folder, "train")
        made(num_batches=1, batch_size=_EVALUATED).write_split_binary(folder, "test")
        predicted_of = partial(predict, dict(flags), batches * batch_size, servers, Path(folder), constants)
        plans = [predicted_of()]
        flags["--dataset"] = folder
        words = [str(word) for pair in flags.items() for word in pair] + ["--no-check_data", "--no-serve"]
        slots = train.spec(folder).slots(dim)
        found = measure(words, batches, servers, slots) if servers else measure_process(words)
        plans.append(predicted_of())  # other work may have changed the speed of the processor meanwhile
    failed = False
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    click.echo(f"cores: {cores}; load average: {load:.1f}; planned limit: {plans[0]['limit']}")
    click.echo("| | predicted | measured | ratio |\n|---|---|---|---|")
    for before, after in zip(*(rows(plan, found, batch_size) for plan in plans), strict=True):
        name, predicted, measured, must_agree = before
        predicted = (predicted + after[1]) / 2
        ratio = predicted / measured
        failed |= must_agree and not 1 / (1 + TOLERANCE) <= ratio <= 1 + TOLERANCE
        click.echo(f"| {name.replace('_', ' ')} | {predicted:,.5g} | {measured:,.5g} | {ratio:.2f} |")
    sys.exit(failed)


if __name__ == "__main__":
    main()
