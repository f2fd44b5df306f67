"""The Criteo recipe with tiny sizes: from made-up clicks and from files, resumed, stopped, on a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.raw_clicks import write_clicks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "criteo"
PERSIA_LAUNCHER = str(Path(sys.executable).parent / "persia-launcher")
TINY = [
    *(
        "--synthetic_dataset_table_sizes",
        "1000,50,4,30,5,5,5,5,5,5,5",
        "--synthetic_dataset_numerical_features",
        "3",
    ),
    *("--synthetic_dataset_num_entries", "20480", "--synthetic_dataset_test_entries", "4096"),
    *("--batch_size", "256", "--test_batch_size", "1024", "--embedding_dim", "4"),
    *("--bottom_mlp_sizes", "16,4", "--top_mlp_sizes", "16,1", "--evals_per_epoch", "2", "--lr", "0.02"),
    *("--warmup_steps", "5", "--decay_start_step", "60", "--decay_steps", "20", "--no-serve"),
]


def run(command: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERSIA_")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, *flags: str) -> str:
    return run([sys.executable, str(EXAMPLE / "train.py"), *TINY, *flags], folder)


def difference(printed: str) -> float:
    return float(re.findall(r"difference (\S+)", printed)[0])


def auc(printed: str) -> float:
    return float(re.findall(r"^AUC (\S+)", printed, re.MULTILINE)[0])


@pytest.mark.timeout(600)
def test_dlrm_from_made_up_clicks_and_the_same_from_files(tmp_path: Path) -> None:
    printed = train(tmp_path, "--serve", "--export_path", str(tmp_path / "exported"))
    assert {path.name for path in (tmp_path / "exported").iterdir()} == {"model", "embedding_config.yml"}
    assert re.findall(r"step (\d+): auc", printed) == ["40", "80"]
    assert abs(difference(printed)) < 0.06  # a guess has 0.35; the best AUC is about 0.85
    ((served, probability),) = re.findall(r"served AUC (\S+); first sample: predicted (\S+), label", printed)
    assert float(served) == pytest.approx(auc(printed), abs=1e-4)
    assert 0 < float(probability) < 1
    data = str(tmp_path / "data")
    train(tmp_path, "--mode", "write_data", "--dataset", data)
    assert len(list((tmp_path / "data" / "train").iterdir())) == 13  # 11 slots, numerical, label
    from_files = train(tmp_path, "--dataset", data)
    # The same samples in the same order; lookups that run ahead make the difference.
    assert auc(from_files) == pytest.approx(auc(printed), abs=0.02)
    assert "planted" not in from_files


@pytest.mark.timeout(600)
def test_from_raw_logs_by_parquet_with_dense_tables(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for number in range(2):
        write_clicks(tmp_path / f"day_{number}", 3000, seed=number, numerical=3, categorical=4)
    command = [PERSIA_LAUNCHER, "preprocess", "day_0", "--test", "day_1", "--output", "data"]
    command += ["--num-numerical", "3", "--num-categorical", "4", "--contiguous", "--format", "parquet"]
    run(command, tmp_path)
    printed = train(tmp_path, "--dataset", "data", "--data_parallel_threshold", "1000", "--serve")
    assert re.findall(r"step (\d+): auc", printed) == ["6", "12"]
    assert re.search(r"training waited \d+\.\d s for batches", printed)
    assert float(re.findall(r"served AUC (\S+);", printed)[0]) == pytest.approx(
        0.5, abs=0.1
    )  # labels by chance


@pytest.mark.timeout(600)
def test_dcnv2_with_bf16_stops_at_a_target_and_keeps_it(tmp_path: Path) -> None:
    flags = ("--interaction", "cross", "--num_cross_layers", "2", "--cross_layer_projection_dim", "4")
    flags += ("--amp", "--auc_threshold", "0.6", "--save_checkpoint_path", str(tmp_path / "checkpoints"))
    printed = train(tmp_path, *flags)
    assert "stopped early, as auc is that of target=0.6 or better" in printed
    assert re.search(r"^AUC \S+ \(target\)", printed, re.MULTILINE)
    again = train(tmp_path, *flags)
    assert "step 40: resumed from" in again
    assert auc(again) == auc(printed)


@pytest.mark.timeout(600)
def test_a_wrong_value_ends_the_job_before_it_trains(tmp_path: Path) -> None:
    data = tmp_path / "data"
    train(tmp_path, "--mode", "write_data", "--dataset", str(data))
    with open(data / "test" / "cat_3.bin", "r+b") as file:  # 30 IDs in bytes
        file.seek(4000)
        file.write(bytes([30]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), *TINY, "--dataset", str(data)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode
    assert re.search(r"test/cat_3.bin: field 'cat_3.bin' is 30 at offset 4000 \(row 4000\)", done.stderr)
    assert "step" not in done.stdout


@pytest.mark.timeout(900)
def test_two_ranks_of_a_cluster(tmp_path: Path) -> None:
    train(tmp_path, "--mode", "write_config")
    slots = yaml.safe_load((tmp_path / "embedding_config.yml").read_text())["slots_config"]
    assert list(slots) == [f"cat_{index}.bin" for index in range(11)]  # not cat_10 before cat_2
    command = [PERSIA_LAUNCHER, "local", "--embedding-config", "embedding_config.yml"]
    command += ["--nn-worker", str(EXAMPLE / "train.py"), "--data-loader", str(EXAMPLE / "data_loader.py")]
    command += ["--nproc-per-node", "2", "--loader-args", " ".join(TINY), "--", *TINY]
    printed = run(command, tmp_path)
    assert re.findall(r"step (\d+): auc", printed) == ["40", "80"]  # of 160 batches of 128
    assert abs(difference(printed)) < 0.06
