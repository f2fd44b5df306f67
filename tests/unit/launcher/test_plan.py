"""`persia-launcher plan`: sizes of published models, what limits a job, errors that name field and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from persia.data import FeatureSpec, SyntheticClicks
from persia.data.synthetic import CRITEO_CARDINALITIES
from persia.errors import ConfigError
from persia.launcher import cli, heap, job_costs, job_plan
from persia.launcher import plan as plan_command
from persia.launcher.job_costs import Constants, Hosts, Job, Role, SlotLoad, Traffic
from persia.messaging.payloads import IdsRequest, SubmittedBatch

HOSTS = {
    "parameter_servers": {"cores": 16, "memory_gib": 256, "network_gbit": 25},
    "embedding_workers": {"cores": 16, "network_gbit": 25},
    "data_loaders": {"cores": 4, "network_gbit": 25},
    "broker": {"cores": 8, "network_gbit": 25},
    "ranks": {"count": 8, "cores": 8, "network_gbit": 25, "samples_per_s": 500_000},
}


def run(folder: Path, *options: str, hosts: dict[str, Any] = HOSTS, spec: Path | None = None) -> Any:
    (folder / "hosts.yaml").write_text(json.dumps(hosts))
    if spec is None:
        spec = folder / "t0.yaml"
        FeatureSpec.make(folder, CRITEO_CARDINALITIES[0]).save(spec)
    words = ["plan", "--feature-spec", str(spec), "--hosts", str(folder / "hosts.yaml"), *options]
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize(("dim", "gib", "servers"), [(128, 421, 2), (512, 4 * 421, 8)])
def test_servers_for_nvidias_extra_large_models(tmp_path: Path, dim: int, gib: float, servers: int) -> None:
    plan = json.loads(run(tmp_path, "--dim", str(dim), "--json").output)
    assert plan["num_rows"] * dim * 4 / 2**30 == pytest.approx(gib, rel=0.001)  # as published
    role = plan["roles"]["parameter_servers"]
    assert role["count"] >= servers
    assert plan["fits"]
    assert role["memory_bytes"] < 0.9 * 256 * 2**30
    assert plan["samples_per_s"] <= 8 * 500_000


def test_the_table_names_the_limit(tmp_path: Path) -> None:
    slow = HOSTS | {"parameter_servers": {"count": 2, "cores": 1, "memory_gib": 64}}
    printed = run(tmp_path, hosts=slow).output
    assert "882,774,575 rows of 537 bytes: 441.8 GiB in all" in printed
    assert "limited by parameter servers: processor" in printed
    assert "The rows do not fit" in printed
    assert "--sample DIR counts those of your data" in printed


def test_a_speed_decides_the_number_of_processes(tmp_path: Path) -> None:
    hosts = HOSTS | {"ranks": HOSTS["ranks"] | {"count": None}}
    counts = {}
    for speed in ("1000000", "4000000"):
        plan = json.loads(run(tmp_path, "--samples-per-s", speed, "--json", hosts=hosts).output)
        assert plan["samples_per_s"] >= float(speed)
        counts[speed] = plan["roles"]["ranks"]["count"]
    assert counts == {"1000000": 2, "4000000": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": {"cores": 4, "samples_per_s": 5}}, "ranks.count=None: give it, or the speed"),
        ({"broker": {}}, "broker.cores=None: give the cores of one process of each role"),
        ({"broker": {"cores": 1, "count": 2}}, "broker.count=2 must be 1"),
        ({"parameter_servers": {"cores": 4}}, "parameter_servers.memory_gib=None: give memory_gib"),
        ({"parameter_servers": {"cores": 4, "memory_gib": 0.01}}, "memory_gib=0.01 has no room for rows"),
        ({"data_loaders": {"cores": 4, "samples_per_s": 5}}, "data_loaders.samples_per_s=5.0: only ranks"),
        ({"servers": {}}, "servers={} is not a known key"),
    ],
)
def test_wrong_hosts(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    failed = run(tmp_path, "--top-mlp-sizes", "8,1", hosts=HOSTS | changes)
    assert failed.exit_code == 1
    assert message in failed.output


def test_wrong_options(tmp_path: Path) -> None:
    assert "optimizer='lamb' must be one of sgd" in run(tmp_path, "--optimizer", "lamb").output
    assert "'8,x' is no list of whole numbers" in run(tmp_path, "--top-mlp-sizes", "8,x").output
    spec = tmp_path / "hashed.yaml"
    FeatureSpec.make(tmp_path, [None]).save(spec)
    failed = run(tmp_path, spec=spec)
    assert "feature 'cat_0.bin' has cardinality None, as its IDs are hashes: pass --sample" in failed.output
    SyntheticClicks([9, 9], num_batches=1, batch_size=8).write_split_binary(str(tmp_path))
    failed = run(tmp_path, "--sample", str(tmp_path), "--batch-size", "8", spec=spec)
    assert "differ in the slots cat_1.bin: name a sample of the same data" in failed.output


def test_hashed_ids_are_counted_in_a_sample(tmp_path: Path) -> None:
    clicks = SyntheticClicks([20_000], num_batches=16, batch_size=1024, num_numerical=2, alpha=1.1)
    clicks.write_split_binary(str(tmp_path))
    spec = clicks.spec(str(tmp_path))
    spec.save()
    everything = job_costs.expected_distinct(20_000, 16 * 1024, 1.1)
    text = (tmp_path / "feature_spec.yaml").read_text()
    (tmp_path / "feature_spec.yaml").write_text(text.replace("cardinality: 20000\n", "cardinality: 30000\n"))
    words = ("--batch-size", "1024", "--samples", str(16 * 1024), "--json", "--sample", str(tmp_path))
    plan = json.loads(run(tmp_path, *words, "--sample-batches", "8", spec=tmp_path).output)
    assert plan["num_rows"] == pytest.approx(everything, rel=0.15)  # of half the data
    plan = json.loads(run(tmp_path, *words, "--sample-batches", "16", spec=tmp_path).output)
    assert plan["num_rows"] == pytest.approx(everything, rel=0.03)


def new_rows(folder: Path, spec: Path, *options: str) -> tuple[dict[str, Any], float]:
    """A plan, and the new rows of a batch: they cost a second each."""
    costs = {"batch_us": 0, "id_ns": 0, "word_ns": 0, "new_row_ns": 1e9}
    (folder / "constants.yaml").write_text(json.dumps({"parameter_servers": costs}))
    words = ("--batch-size", "1024", "--json", "--constants", str(folder / "constants.yaml"), *options)
    plan = json.loads(run(folder, *words, spec=spec).output)
    return plan, plan["roles"]["parameter_servers"]["cpu_s"]


def test_new_rows_of_a_sample_that_is_a_part_of_the_data(tmp_path: Path) -> None:
    clicks = SyntheticClicks([100_000], num_batches=16, batch_size=1024, num_numerical=2, alpha=1.1)
    clicks.write_split_binary(str(tmp_path))
    clicks.spec(str(tmp_path)).save()
    text = (tmp_path / "feature_spec.yaml").read_text()
    assert "cardinality: 100000\n" in text
    text = text.replace("cardinality: 100000\n", "cardinality: 30000000\n")
    (tmp_path / "feature_spec.yaml").write_text(text)
    plan, new = new_rows(tmp_path, tmp_path, "--sample", str(tmp_path))
    assert plan["num_rows"] == 30_000_000
    inserted = job_costs.expected_distinct(100_000, 16 * 1024, 1.1)
    assert new == pytest.approx(inserted / 16, rel=0.05)


@pytest.mark.parametrize("has_sample", [False, True])
def test_a_batch_inserts_no_more_rows_than_it_has(tmp_path: Path, has_sample: bool) -> None:
    clicks = SyntheticClicks([20_000], num_batches=2, batch_size=1024, num_numerical=2, alpha=1.1)
    clicks.write_split_binary(str(tmp_path))
    clicks.spec(str(tmp_path)).save()
    words = ("--sample", str(tmp_path)) if has_sample else ()
    plan, new = new_rows(tmp_path, tmp_path, "--samples", "100", *words)
    assert new == pytest.approx(plan["rows_of_batch"])


def test_a_sample_may_be_parquet(tmp_path: Path) -> None:
    pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    random = np.random.default_rng(0)
    table = {"label": np.zeros(4096, np.uint8), "num_0": np.zeros(4096, np.float32)}
    table["cat_0"] = random.integers(0, 50, 4096).astype(np.int64)
    (tmp_path / "train").mkdir()
    parquet.write_table(pa.table(table), tmp_path / "train" / "0.parquet", row_group_size=300)
    FeatureSpec.make_parquet(tmp_path, [None], num_numerical=1, mappings=["train"]).save()
    words = ("--batch-size", "256", "--json", "--sample", str(tmp_path), "--sample-batches", "4")
    assert json.loads(run(tmp_path, *words, spec=tmp_path).output)["num_rows"] == 50


@pytest.mark.parametrize("group_rows", [100, 1024, 16384])
def test_time_of_reading_parquet_is_that_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    from persia.data import ParquetBatches

    kinds = {"label": np.uint8, "num_0": np.float32, "cat_0": np.int64}
    table = {name: np.zeros(16384, kind) for name, kind in kinds.items()}
    (tmp_path / "train").mkdir()
    parquet.write_table(pa.table(table), tmp_path / "train" / "0.parquet", row_group_size=group_rows)
    FeatureSpec.make_parquet(tmp_path, [9], num_numerical=1, mappings=["train"]).save()
    clock, row_groups, make = [0.0], ParquetBatches._row_groups, ParquetBatches.make

    class Group:
        """A second a row, of all rows when the first one is read, as pyarrow decodes row groups."""

        def __init__(self, group: Any) -> None:
            self._group, self.row_groups, self.path = group, group.row_groups, group.path

        def to_batches(self, **options: Any) -> Any:
            clock[0] += self.row_groups[0].num_rows
            return self._group.to_batches(**options)

    def slow_make(self: ParquetBatches, rows: Any, **options: Any) -> Any:
        clock[0] += 2 * rows.num_rows
        return make(self, rows, **options)

    monkeypatch.setattr(ParquetBatches, "_row_groups", lambda self: map(Group, row_groups(self)))
    monkeypatch.setattr(ParquetBatches, "make", slow_make)
    monkeypatch.setattr(plan_command, "time", SimpleNamespace(process_time=lambda: clock[0]))
    costs = {"data_loaders": {"batch_us": 0, "id_ns": 0, "word_ns": 0}}
    (tmp_path / "constants.yaml").write_text(json.dumps(costs))
    words = ("--batch-size", "256", "--json", "--constants", str(tmp_path / "constants.yaml"))
    words += ("--sample", str(tmp_path), "--sample-batches", "4")
    plan = json.loads(run(tmp_path, *words, spec=tmp_path).output)
    assert plan["roles"]["data_loaders"]["cpu_s"] == pytest.approx(3 * 256)


def test_a_sample_says_how_long_a_loader_reads(tmp_path: Path) -> None:
    clicks = SyntheticClicks([500, 80], num_batches=4, batch_size=4096, num_numerical=2)
    clicks.write_split_binary(str(tmp_path))
    clicks.spec(str(tmp_path)).save()
    plans = [
        json.loads(run(tmp_path, "--batch-size", "4096", "--json", *words, spec=tmp_path).output)["roles"]
        for words in ((), ("--sample", str(tmp_path)))
    ]
    assumed, sampled = (plan["data_loaders"]["cpu_s"] for plan in plans)
    assert sampled > assumed > 0


def test_new_rows_cost_time_of_servers() -> None:
    slots = [SlotLoad(name="a", rows=1e6, distinct=1000, new=new) for new in (0, 500)]
    hosts = Hosts(machine=Role(cores=2.0, memory_gib=8.0))
    old, new = (
        job_plan.plan_job(Job(batch_size=2048, dim=16, slots=[slot]), hosts, Constants()) for slot in slots
    )
    assert new.roles["parameter_servers"].cpu_s > 1.2 * old.roles["parameter_servers"].cpu_s
    assert new.samples_per_s < old.samples_per_s


@pytest.mark.parametrize("in_process", [False, True])
def test_the_thread_of_the_loop_limits_a_large_machine(in_process: bool) -> None:
    slot = SlotLoad(name="a", rows=1e6, distinct=1000)
    job = Job(batch_size=2048, dim=16, dense_cpu_s=0.05, slots=[slot])
    machine = Role(cores=64.0, memory_gib=8.0)
    if in_process:
        plan = job_plan.plan_process(job, machine, Constants())
    else:
        plan = job_plan.plan_job(job, Hosts(machine=machine), Constants())
    name = "one_process" if in_process else "ranks"
    assert plan.limit == f"{name}: thread"
    assert plan.samples_per_s == pytest.approx(2048 / plan.roles[name].thread_s, rel=0.02)


def test_one_batch_in_flight_is_slower() -> None:
    slot = SlotLoad(name="a", rows=1e6, distinct=1000)
    hosts = [
        Hosts(machine=Role(cores=64.0, memory_gib=8.0)),
        Hosts(
            parameter_servers=Role(cores=8, memory_gib=8, count=1),
            ranks=Role(cores=8, count=1),
            embedding_workers=Role(cores=8, count=8),
            data_loaders=Role(cores=8, count=8),
            broker=Role(cores=8),
        ),
    ]
    jobs = [
        Job(batch_size=2048, dim=16, dense_cpu_s=0.005, in_flight=count, slots=[slot]) for count in (1, 8)
    ]
    for one in hosts:
        plans = [job_plan.plan_job(job, one, Constants()) for job in jobs]
        assert plans[0].limit == "ranks: batches in flight"
        assert plans[0].samples_per_s < 0.9 * plans[1].samples_per_s


def hosts_of_one_rank(rank: Role) -> Hosts:
    """Other roles have more cores than they need."""
    others = Role(cores=64, count=8)
    return Hosts(
        parameter_servers=Role(cores=64, memory_gib=8, count=1),
        ranks=rank,
        embedding_workers=others,
        data_loaders=others,
        broker=Role(cores=64),
    )


@pytest.mark.parametrize("cores", [16, 32])
def test_threads_of_torch_shorten_the_time_of_a_batch_in_flight(cores: int) -> None:
    job = Job(batch_size=2048, dim=16, dense_cpu_s=0.2, slots=[SlotLoad(name="a", rows=1e6, distinct=1000)])
    plan = job_plan.plan_job(job, hosts_of_one_rank(Role(cores=cores, count=1)), Constants())
    assert plan.limit == "ranks: thread"
    loop_s = Constants().loop.batch_us * 1e-6
    assert plan.samples_per_s == pytest.approx(2048 / (0.2 / cores + loop_s), rel=0.01)


def test_a_batch_in_flight_waits_for_the_rank_and_its_device() -> None:
    job = Job(batch_size=2048, dim=16, in_flight=1, slots=[SlotLoad(name="a", rows=1e6, distinct=1000)])
    seconds = []
    for rate in (None, 1e12, 20480.0):
        rank = Role(cores=8, count=1, samples_per_s=rate)
        plan = job_plan.plan_job(job, hosts_of_one_rank(rank), Constants())
        assert plan.limit == "ranks: batches in flight"
        seconds.append(2048 / plan.samples_per_s)
    assert seconds[1] == pytest.approx(seconds[0])
    assert seconds[2] == pytest.approx(seconds[0] + 0.1)


def test_the_model_is_timed_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "ctypes", None)  # settings of memory need it, and here it is missing
    rank = {"count": 1, "cores": 8}
    words = ("--json", "--batch-size", "64", "--top-mlp-sizes", "8,1", "--bottom-mlp-sizes", "8")
    plan = json.loads(run(tmp_path, *words, "--dim", "8", hosts=HOSTS | {"ranks": rank}).output)
    assert plan["roles"]["ranks"]["thread_s"] > Constants().loop.batch_us * 1e-6


def test_help_says_that_a_loader_has_no_bound_by_default() -> None:
    printed = " ".join(CliRunner().invoke(cli, ["plan", "--help"]).output.split())
    assert "A DataLoader has no bound by default: give it this one." in printed


def test_one_process(tmp_path: Path) -> None:
    words = (
        "--in-process",
        "--json",
        "--batch-size",
        "64",
        "--top-mlp-sizes",
        "8,1",
        "--bottom-mlp-sizes",
        "8",
    )
    plan = json.loads(run(tmp_path, *words, "--dim", "8").output)
    assert list(plan["roles"]) == ["one_process"]
    assert plan["samples_per_s"] > 0


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0, 1.45])
def test_distinct_ids_of_a_power_law(alpha: float) -> None:
    clicks = SyntheticClicks([100_000], num_batches=8, batch_size=4096, alpha=alpha)
    seen = np.mean([len(np.unique(clicks.columns(number)[1][0])) for number in clicks.read()])
    assert job_costs.expected_distinct(100_000, 4096, alpha) == pytest.approx(seen, rel=0.03)


def test_bytes_of_the_messages_of_a_data_loader() -> None:
    clicks = SyntheticClicks([1000, 50], hotness=[1, 3], num_batches=1, batch_size=512)
    batch = clicks.make(0, requires_grad=True)
    ids = batch.encode_id_features()
    distinct = [len(np.unique(column)) for column in clicks.columns(0)[1]]
    slots = [
        SlotLoad(name=f"cat_{i}.bin", hotness=hotness, rows=rows, distinct=distinct[i])
        for i, (hotness, rows) in enumerate(((1, 1000), (3, 50)))
    ]
    traffic = Traffic.of(Job(batch_size=512, dim=8, slots=slots), 1, 1)
    sent = len(IdsRequest(0, 1, ids).encode())
    assert traffic.id_features == pytest.approx(sent, rel=0.01)
    submitted = SubmittedBatch(0, 0, 0, 0, 0, 1, 1, batch.encode_dense(), ids)
    assert traffic.submitted == pytest.approx(len(submitted.encode()), rel=0.01)


def test_a_hosts_file_of_a_call_obeys_the_same_rules() -> None:
    with pytest.raises(ConfigError, match="machine.memory_gib=None: give memory_gib and cores"):
        Hosts(machine=Role(cores=2.0))
    job = Job(batch_size=8, dim=8, slots=[SlotLoad(name="a", rows=10, distinct=4)])
    machine = Role(cores=2.0, memory_gib=1.0)
    plan = job_plan.plan_job(job, Hosts(machine=machine), Constants())
    assert plan.limit == "ranks: processor"
    assert plan.fits
    plan = job_plan.plan_job(job, Hosts(machine=machine, ranks=Role(samples_per_s=1.0)), Constants())
    assert (plan.limit, plan.samples_per_s) == ("ranks: device", 1.0)
