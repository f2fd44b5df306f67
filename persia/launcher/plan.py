"""`persia-launcher plan`: what a job needs, and what limits it, before it is started."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import click

from persia.launcher.heap import keep_heap
from persia.launcher.options import COUNT, option

if TYPE_CHECKING:
    from persia.data import FeatureSpec
    from persia.launcher.job_costs import Hosts, Job, Role, SlotLoad
    from persia.launcher.job_plan import Plan

_MAX_TIMED = 8192  # samples of the batch with which the dense model is timed
_GIB = 2**30


def _sizes(_ctx: click.Context, _param: click.Parameter, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{text!r} is no list of whole numbers from 1, like 512,256,128")
    return [int(word) for word in words]


@click.command("plan")
@option(
    "--feature-spec", required=True, metavar="PATH", help="A feature_spec.yaml, or the folder that has it."
)
@option(
    "--hosts",
    metavar="FILE",
    help="Processes, cores, memory and network of each role (YAML). Without it: one process of each role, "
    "all on this machine.",
)
@option("--in-process", is_flag=True, help="Plan a job in one process of this machine, without servers.")
@option("--batch-size", type=click.IntRange(1, 65535), default=32768, help="Samples of one rank's batch.")
@option("--dim", type=click.IntRange(1, 65536), default=128, help="Elements of an embedding.")
@option("--optimizer", default="sgd", metavar="NAME", help="Of the embeddings, as in embedding_config.yml.")
@option(
    "--embedding-staleness",
    type=click.IntRange(min=1),
    default=8,
    help="Batches of a rank between lookup and update. "
    "A DataLoader has no bound by default: give it this one.",
)
@option(
    "--row-dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    help="Of the rows in memory.",
)
@option("--model", type=click.Choice(["dlrm", "dcnv2"]), default="dlrm", help="The dense part.")
@option(
    "--bottom-mlp-sizes",
    default="512,256,128",
    callback=_sizes,
    help="Layers for the dense features; the last one becomes --dim.",
)
@option(
    "--top-mlp-sizes", default="1024,1024,512,256,1", callback=_sizes, help="Layers after the interaction."
)
@option(
    "--sample",
    metavar="DIR",
    help="Count the distinct IDs in batches of this data set, a folder with a "
    "feature_spec.yaml, and time its reading. Without it: a power law, and no reading.",
)
@option("--mapping", default="train", help="Mapping of the feature spec in --sample.")
@option("--sample-batches", type=click.IntRange(min=2), default=16, help="Batches of --sample to read.")
@option(
    "--alpha",
    type=click.FloatRange(min=0),
    default=1.1,
    help="Exponent of the power law of IDs, where the feature spec has none.",
)
@option("--samples", type=COUNT, help="Samples to train, of all epochs. Without it: all IDs occur.")
@option(
    "--samples-per-s",
    type=click.FloatRange(min=0, min_open=True),
    help="Speed that roles without a count are sized for; default: that of the ranks.",
)
@option(
    "--constants",
    metavar="FILE",
    help="Measured costs of this kind of machine, of `python -m benchmarks.role_costs`; default: built-in.",
)
@option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(**given: Any) -> None:
    """Predict the rows, memory, network and speed of a job from its feature spec.

    \b
    How many servers of 256 GiB hold Criteo 1TB without a frequency limit?
      persia-launcher plan --feature-spec criteo_t0.yaml --hosts hosts.yaml

    \b
    hosts.yaml has the resources of one process of each role. A role without a count gets as many
    processes as memory and speed need:
      parameter_servers: {cores: 16, memory_gib: 256, network_gbit: 25}
      embedding_workers: {cores: 16, network_gbit: 25}
      data_loaders: {cores: 4, network_gbit: 25}
      broker: {cores: 8, network_gbit: 25}
      ranks: {count: 8, cores: 8, network_gbit: 25, samples_per_s: 500000}

    samples_per_s is the speed of the dense model on one rank's GPU. Without it, the model is timed on this
    machine's processor, with one thread. The last line names what limits the job. A thread is that of a
    rank's training loop, or of a data loader.
    """
    from persia.config.loading import load_section
    from persia.launcher import job_costs, job_plan

    path = given["constants"]
    constants = load_section(job_costs.Constants, path) if path else job_costs.Constants()
    hosts = _hosts(given["hosts"])
    job = _job(given, times_model=hosts.ranks.samples_per_s is None or given["in_process"])
    if given["in_process"]:
        plan = job_plan.plan_process(job, hosts.machine or _this_machine(), constants)
    else:
        plan = job_plan.plan_job(job, hosts, constants, given["samples_per_s"])
    if given["as_json"]:
        click.echo(json.dumps(asdict(plan), indent=2))
    else:
        if not given["sample"]:
            click.echo(
                "Distinct IDs are those of a power law (--alpha); --sample DIR counts those of your data."
            )
        _show(plan, job)


def _hosts(path: str | None) -> Hosts:
    from persia.config.loading import load_section
    from persia.launcher.job_costs import Hosts

    return load_section(Hosts, path) if path else Hosts(machine=_this_machine())


def _this_machine() -> Role:
    from persia.launcher.job_costs import Role

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    return Role(cores=float(len(os.sched_getaffinity(0))), memory_gib=memory / _GIB)


def _job(given: Mapping[str, Any], *, times_model: bool) -> Job:
    from persia.data import FeatureSpec
    from persia.launcher.job_costs import Job

    spec = FeatureSpec.load(given["feature_spec"])
    parameters, cpu_s = _dense(given, spec, times_model=times_model)
    names = ("batch_size", "dim", "optimizer", "row_dtype")
    slots, read_s = _sampled(given, spec) if given["sample"] else (_assumed(given, spec), 0.0)
    return Job(
        **{name: given[name] for name in names},
        in_flight=given["embedding_staleness"],
        num_numerical=len(spec.numerical),
        dense_parameters=parameters,
        dense_cpu_s=cpu_s,
        read_cpu_s=read_s,
        slots=slots,
    )


def _assumed(given: Mapping[str, Any], spec: FeatureSpec) -> list[SlotLoad]:
    """The slots by cardinality and power law."""
    from persia.errors import ConfigError
    from persia.launcher.job_costs import SlotLoad, expected_distinct

    slots = []
    for name in spec.categorical:
        feature = spec.features[name]
        size, alpha = feature.cardinality, given["alpha"] if feature.alpha is None else feature.alpha
        if size is None:
            raise ConfigError(
                f"feature {name!r} has cardinality None, as its IDs are hashes: pass --sample with the "
                "folder of its data, whose IDs are counted"
            )
        samples = given["samples"]
        rows = expected_distinct(size, samples * feature.hotness, alpha) if samples else float(size)
        distinct = expected_distinct(size, given["batch_size"] * feature.hotness, alpha)
        new = min(distinct, rows * given["batch_size"] / samples) if samples else 0.0
        slots.append(SlotLoad(name=name, hotness=feature.hotness, rows=rows, distinct=distinct, new=new))
    return slots


def _sampled(given: Mapping[str, Any], spec: FeatureSpec) -> tuple[list[SlotLoad], float]:
    """The slots by counting IDs in batches spread over the data, and seconds to read and make a batch."""
    import numpy as np

    from persia.data import FeatureSpec, open_batches
    from persia.errors import ConfigError
    from persia.launcher.job_costs import SlotLoad, grown

    sample, size = FeatureSpec.load(given["sample"]), given["batch_size"]
    batches = open_batches(sample, given["mapping"], batch_size=size)
    if different := set(sample.categorical) ^ set(spec.categorical):
        raise ConfigError(
            f"--sample={given['sample']} and --feature-spec={given['feature_spec']} differ in the slots "
            f"{', '.join(sorted(different))}: name a sample of the same data"
        )
    num_read = min(given["sample_batches"], len(batches))
    # Spread over the data, as IDs of one day resemble each other: batches in a row would show too few.
    numbers = np.linspace(0, len(batches) - 1, num_read).round().astype(int).tolist()
    per_batch: dict[str, list[int]] = {name: [] for name in spec.categorical}
    seen: dict[str, Any] = {}
    half: dict[str, Any] = {}  # of every second batch, so that these are spread over the data, too
    for place, rows in enumerate(batches.read_some(numbers)):
        for feature in batches.make(rows, requires_grad=False).id_type_features:
            found = np.unique(feature.ids)
            per_batch[feature.name].append(len(found))
            for counts in (seen, half) if place % 2 or num_read == 1 else (seen,):
                counts[feature.name] = np.union1d(counts.get(feature.name, found[:0]), found)
    samples = given["samples"] or batches.num_rows
    share, slots = samples / min(num_read * size, batches.num_rows), []
    for name in spec.categorical:
        cardinality = spec.features[name].cardinality
        found_rows = grown(len(seen[name]), len(half[name]), share, bound=float(cardinality or "inf"))
        # The whole data has all IDs. `samples` may be those of a part, which inserts the rows that it has.
        num_rows = float(cardinality) if cardinality and not given["samples"] else found_rows
        hotness, distinct = spec.features[name].hotness, float(np.mean(per_batch[name]))
        new = min(distinct, found_rows * size / samples)
        slots.append(SlotLoad(name=name, hotness=hotness, rows=num_rows, distinct=distinct, new=new))
    return slots, _read_s(batches, num_read)


def _read_s(batches: Any, num_read: int) -> float:
    """Processor time to read and make a batch, by the first `num_read` ones, as a data loader reads them.

    What is decoded with them for later batches counts as theirs.
    """
    decoded_s = made_s = 0.0
    reading = batches.read()
    for _ in range(num_read):
        begin = time.process_time()
        rows = next(reading)
        decoded = time.process_time()
        batches.make(rows, requires_grad=False)
        decoded_s, made_s = decoded_s + decoded - begin, made_s + time.process_time() - decoded
    size, num_made = batches.batch_size, min(num_read * batches.batch_size, batches.num_rows)
    read_s: float = decoded_s * size / batches.rows_decoded(num_read) + made_s * size / num_made
    return read_s


def _dense(given: Mapping[str, Any], spec: FeatureSpec, *, times_model: bool) -> tuple[int, float]:
    """Parameters of the dense model, and the processor time of a batch on this machine or 0."""
    count = len(spec.numerical), len(spec.categorical), given["dim"]
    num_parameters = sum(parameter.numel() for parameter in _model(given, count).parameters())
    if not times_model:
        return num_parameters, 0.0
    # Settings of memory and threads are those of a whole process, and glibc's cannot be restored.
    # A new interpreter, not a fork: threads of torch do not survive one.
    with ProcessPoolExecutor(1, get_context("spawn"), keep_heap) as child:
        return num_parameters, child.submit(_step_s, dict(given), count).result()


def _model(given: Mapping[str, Any], count: tuple[int, int, int]) -> Any:
    from persia.models import DLRM, DCNv2

    bottom, top = [*given["bottom_mlp_sizes"][:-1], given["dim"]], given["top_mlp_sizes"]
    kind = DLRM if given["model"] == "dlrm" else DCNv2
    return kind(*count, bottom_mlp_sizes=bottom, top_mlp_sizes=top)


def _step_s(given: Mapping[str, Any], count: tuple[int, int, int]) -> float:
    """Processor time that torch needs for the dense model and a batch, with one thread."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    model, size = _model(given, count), min(given["batch_size"], _MAX_TIMED)
    dense, labels = [torch.randn(size, count[0])], torch.rand(size, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    torch.set_num_threads(1)  # threads that wait for each other use processor time, too
    seconds: list[float] = []
    kept: deque[Any] = deque(maxlen=2)
    while len(seconds) < 5 or sum(seconds) < 1.0:
        # As in training, a batch has new tensors, and gradients stay until they are sent.
        embeddings = [torch.randn(size, count[2], requires_grad=True) for _ in range(count[1])]
        begin = time.process_time()
        optimizer.zero_grad()
        loss: Any = binary_cross_entropy_with_logits(model(dense, embeddings), labels)
        loss.backward()
        optimizer.step()
        seconds.append(time.process_time() - begin)
        kept.append(embeddings)
    of_batch: float = statistics.median(seconds) * given["batch_size"] / size
    return of_batch


def _show(plan: Plan, job: Job) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("role", "processes", "memory of each", "MB in", "MB out", "processor ms", "samples/s")
    table = Table(*columns, caption="MB and ms: for a batch of one rank, all processes of the role together")
    for name, role in plan.roles.items():
        memory = "" if role.memory_bytes is None else f"{role.memory_bytes / _GIB:,.2f} GiB"
        rate = "" if role.samples_per_s is None else f"{role.samples_per_s:,.0f} ({role.limit})"
        moved = (f"{value / 1e6:,.2f}" for value in (role.received_bytes, role.sent_bytes))
        table.add_row(
            name.replace("_", " "), str(role.count), memory, *moved, f"{role.cpu_s * 1e3:,.2f}", rate
        )
    console = Console(width=120, highlight=False)
    total = plan.num_rows * plan.row_bytes / _GIB
    console.print(f"{plan.num_rows:,.0f} rows of {plan.row_bytes:,.0f} bytes: {total:,.1f} GiB in all")
    console.print(
        f"batch: {job.batch_size:,} samples, {plan.ids_of_batch:,} IDs, {plan.rows_of_batch:,.0f} distinct"
    )
    console.print(table)
    if not plan.fits:
        click.secho(
            "The rows do not fit: nine tenths of the memory are usable. Add servers or memory, or use "
            "storage tiers.",
            fg="red",
        )
    console.print(f"{plan.samples_per_s:,.0f} samples/s, limited by {plan.limit.replace('_', ' ')}")
