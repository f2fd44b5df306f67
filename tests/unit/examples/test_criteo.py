"""Parts of the Criteo recipe that need no training."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from persia.config import parse_embedding_config
from persia.data import FeatureSpec, SplitBinaryBatches, SplitBinaryWriter
from persia.errors import InvalidArgumentError
from recipe import Limited, Recipe, parse


def test_limited_batches_have_the_order_of_their_epoch(tmp_path: Path) -> None:
    spec = FeatureSpec.make(tmp_path, [None], num_numerical=0, mappings=["train"])
    with SplitBinaryWriter(spec, "train") as writer:
        writer.write(None, [np.arange(64)], np.zeros(64))
    batches = SplitBinaryBatches(spec, batch_size=4, shuffle_seed=3)

    def ids(source: SplitBinaryBatches | Limited, count: int) -> list[list[int]]:
        made = [source.make(rows, requires_grad=False) for rows in source.read()]
        return [batch.id_type_features[0].ids.tolist() for batch in made[:count]]

    limited = Limited(batches, 5)
    orders = [ids(limited.of_epoch(epoch), 16) for epoch in range(2)]
    assert orders == [ids(batches.of_epoch(epoch), 5) for epoch in range(2)]
    assert orders[0] != orders[1]


def test_tables_up_to_the_threshold_are_dense() -> None:
    flags = ["--synthetic_dataset_table_sizes", "10,100,101", "--embedding_dim", "8"]
    for threshold, dense in (("807", ["cat_0.bin", "cat_1.bin"]), ("7", [])):
        made = Recipe(parse([*flags, "--data_parallel_threshold", threshold]), 1)
        assert list(parse_embedding_config(made.slots()).dense_slots) == dense


def test_the_preset_of_mlperf_makes_several_ids_of_a_sample_up(tmp_path: Path) -> None:
    flags = ["--preset", "mlperf_dcnv2", "--batch_size", "64", "--synthetic_dataset_num_entries", "64"]
    made = Recipe(parse([*flags, "--synthetic"]), 1)
    counts = [len(feature.ids) // 64 for feature in made.train.make(0, requires_grad=False).id_type_features]
    assert sum(counts) == 214
    made.train.write_split_binary(str(tmp_path))
    spec = FeatureSpec.load(tmp_path)
    assert [spec.features[name].hotness for name in spec.categorical] == counts
    with pytest.raises(InvalidArgumentError, match="hotness has 26 values, cardinalities 2"):
        Recipe(parse([*flags, "--synthetic", "--synthetic_dataset_table_sizes", "10,20"]), 1)


def test_a_batch_is_divided_among_the_ranks_of_the_job() -> None:
    flags = ["--synthetic_dataset_table_sizes", "10", "--batch_size", "256"]
    for num_ranks in (1, 2):
        made = Recipe(parse(flags), num_ranks).train
        assert made.make(0, requires_grad=False).batch_size == 256 // num_ranks
    assert len(Recipe(parse([*flags, "--num_ranks", "2"]), 2).train) == len(made)
    with pytest.raises(InvalidArgumentError, match="--num_ranks is 3, the job has 2: leave the flag out"):
        Recipe(parse([*flags, "--num_ranks", "3"]), 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--mode write_data needs --dataset DIR, the folder to write to"),
        (["--dataset", "data", "--max_steps", "3"], "set --synthetic_dataset_num_entries to the samples"),
    ],
)
def test_wrong_flags_of_write_data(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--mode", "write_data", *flags])
    assert message in capsys.readouterr().err


@pytest.fixture
def script() -> ModuleType:
    """The example's train.py: by its name, tests import that of another example."""
    path = Path(__file__).resolve().parents[3] / "examples" / "criteo" / "train.py"
    spec = importlib.util.spec_from_file_location("criteo_train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_server_that_never_answers_and_ignores_its_end_is_killed(script: ModuleType) -> None:
    ignores = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        with pytest.raises(SystemExit, match=r"does not answer at 127.0.0.1:1 within 0.1 s"):
            script._client(server, "127.0.0.1:1", wait_s=0.1)
        script.end(server, wait_s=0.1)
        assert server.returncode == -9
        with pytest.raises(SystemExit, match="the server ended before it answered"):
            script._client(server, "127.0.0.1:1")
