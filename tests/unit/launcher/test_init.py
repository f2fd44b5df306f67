"""`persia-launcher init`: columns by their types, no file overwritten, a job that runs, as examples/dlrm."""

from __future__ import annotations

import ast
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from persia.config import load_embedding_config
from persia.errors import InvalidArgumentError
from persia.launcher import cli
from persia.launcher.init import columns_of, job_files

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

EXAMPLE = Path(__file__).parents[3] / "examples" / "dlrm"
DENSE, IDS = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]


def init(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["init", *map(str, arguments)])


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the job's train.py as a program, in this process and from another directory."""
    for name in ("RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder.parent)
    runpy.run_path(str(folder / "train.py"), run_name="__main__")


def test_columns_get_roles_by_their_types() -> None:
    schema = pa.schema(
        {
            "Click": pa.int8(),
            "user": pa.int64(),
            "country": pa.dictionary(pa.int32(), pa.string()),
            "tags": pa.list_(pa.string()),
            "price": pa.float64(),
            "member": pa.bool_(),
            "vector": pa.list_(pa.float32()),
            "time": pa.timestamp("s"),
        }
    )
    labels, dense, ids, others = columns_of(schema, None)
    assert (labels, dense, ids) == (["Click"], ["price", "member"], ["user", "country", "tags"])
    assert [column.split()[0] for column in others] == ["vector", "time"]
    assert columns_of(schema, "member")[:2] == (["member"], ["price"])
    with pytest.raises(InvalidArgumentError, match="--label clicks: the file has Click, user"):
        columns_of(schema, "clicks")
    with pytest.raises(InvalidArgumentError, match=r"name it with --label; the file has user"):
        columns_of(pa.schema({"user": pa.int64()}), None)
    with pytest.raises(InvalidArgumentError, match="needs at least one ID column"):
        columns_of(pa.schema({"label": pa.int64(), "price": pa.float32()}), None)


def test_other_columns_with_names_of_labels_are_left_out(tmp_path: Path) -> None:
    schema = pa.schema(
        {
            "label": pa.string(),
            "click": pa.int8(),
            "Conversion": pa.int8(),
            "user": pa.int64(),
            "y": pa.float32(),
        }
    )
    labels, dense, ids, others = columns_of(schema, None)
    assert (labels, dense, ids) == (["click"], [], ["user"])
    assert others == [f"{name} (may leak the label)" for name in ("label", "Conversion", "y")]
    assert columns_of(schema, "Conversion")[0] == ["Conversion"]
    with pytest.raises(InvalidArgumentError, match="no column of numbers or bools"):
        columns_of(pa.schema({"label": pa.string(), "user": pa.int64()}), None)
    parquet.write_table(pa.table({"click": [0, 1], "label": [1, 0], "user": [1, 2]}), tmp_path / "a.parquet")
    assert "label is taken" in init(tmp_path / "job", "--parquet", tmp_path / "a.parquet").output


def test_long_lists_of_any_names_can_be_compiled() -> None:
    names = [f'{"a column" * (i % 4 + 1)}, with {i} "words" and more' for i in range(60)]
    train, *_ = job_files('"clicks"', ["label"], [*names, "{"], ["a{1..3}"], 8)
    compile(train, "train.py", "exec")
    found = {
        line.targets[0].id: ast.literal_eval(line.value)
        for line in ast.parse(train).body
        if isinstance(line, ast.Assign) and getattr(line.targets[0], "id", "") in ("DENSE", "IDS")
    }
    assert found == {"DENSE": [*names, "{"], "IDS": ["a{1..3}"]}
    assert max(map(len, train.splitlines())) <= 110


def test_columns_that_cannot_be_slots_are_left_out(tmp_path: Path) -> None:
    bad = ["a{1..3}", "", "bell\a", "line\u2028", "next\x85"]
    good = ["用户 id", "a{1", "a: b", "'q'", "#c", "no", "7", "\u3000", "😀"]
    schema = pa.schema([("label", pa.int8()), *((name, pa.int64()) for name in (*bad, *good))])
    labels, _, ids, others = columns_of(schema, None)
    assert ids == good
    assert len(others) == len(bad)
    assert all("embedding_config.yml cannot have this name" in text and text.isprintable() for text in others)
    _, _, slots, _ = job_files('"clicks"', labels, [], ids, 8)
    (tmp_path / "slots.yml").write_text(slots, encoding="utf-8")
    assert list(load_embedding_config(tmp_path / "slots.yml").slots_config) == good


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": [1, 2]}, "name it with --label"),
        ({"label": [1, 2], "user": [1, 2]}, "label column 'label' has values such as 2: it must be 0 or 1"),
        ({"label": [1, None], "user": [1, 2]}, "has values such as None"),
        ({"label": pa.array([], pa.int8()), "user": pa.array([], pa.int64())}, "the files have no rows"),
    ],
)
def test_a_refused_file_leaves_no_files(tmp_path: Path, columns: dict[str, object], message: str) -> None:
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    refused = init(tmp_path / "job", "--parquet", tmp_path / "a.parquet")
    assert refused.exit_code != 0
    assert message in " ".join(refused.output.split())
    assert not (tmp_path / "job").exists()


def test_a_job_in_the_directory_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Parquet files are taken, and printed paths are quoted."""
    folder = tmp_path / "my clicks"
    folder.mkdir()
    (folder / "NOTES.md").write_text("mine")
    table = pa.table({"label": np.arange(400) % 2, "user": np.arange(400) % 2})
    parquet.write_table(table, folder / "a.parquet")
    result = init(folder, "--parquet", folder)
    assert result.exit_code == 0, result.output
    assert f"python '{folder}/train.py'" in result.output
    run(folder, monkeypatch)


@pytest.mark.parametrize("names", [["C1", "C2", "C4", "a", "b7", "b8"], ["C08", "C09", "C10"], ["x"] * 1])
def test_slots_of_the_config_are_the_columns(names: list[str], tmp_path: Path) -> None:
    _, _, slots, _ = job_files('"clicks"', ["label"], [], names, 8)
    (tmp_path / "slots.yml").write_text(slots)
    assert list(load_embedding_config(tmp_path / "slots.yml").slots_config) == names


def test_more_slots_than_the_default_prefix_has_room_for(tmp_path: Path) -> None:
    names = [f"slot_of_{i:03}x" for i in range(300)]
    _, _, slots, _ = job_files('"clicks"', ["label"], [], names, 8)
    (tmp_path / "slots.yml").write_text(slots)
    assert len(load_embedding_config(tmp_path / "slots.yml").slots_config) == 300


def test_a_job_for_a_file_runs_and_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without dense columns, and with a name that must be quoted in Python and in YAML."""
    file, folder = tmp_path / "rows.parquet", tmp_path / "job"
    random = np.random.default_rng(0)
    users = random.integers(30, size=400)
    parquet.write_table(pa.table({"on": users % 2, 'user "id"': users, "no": users.astype(str)}), file)
    result = init(folder, "--parquet", file, "--label", "on")
    assert result.exit_code == 0, result.output
    assert 'ID:       user "id", no' in result.output
    run(folder, monkeypatch)
    auc = capsys.readouterr().out.split("auc ")[-1].split(",")[0]
    assert float(auc) > 0.8
    before = (folder / "train.py").read_text()
    refused = init(folder, "--parquet", file, "--label", "on")
    assert refused.exit_code != 0
    assert "has train.py, data_loader.py, embedding_config.yml, README.md already" in refused.output
    assert (folder / "train.py").read_text() == before


def test_a_directory_with_other_files_is_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert init(tmp_path).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("notes.txt", "train.py", "data_loader.py", "embedding_config.yml", "README.md", "clicks.parquet")
    }
    refused = init(tmp_path)
    assert "clicks.parquet already" in refused.output


def test_the_dlrm_example_is_what_init_writes() -> None:
    train, loader, slots, _ = job_files('str(HERE / "criteo")', ["label"], DENSE, IDS, 1024)
    assert (EXAMPLE / "train.py").read_text() == train
    assert (EXAMPLE / "data_loader.py").read_text() == loader
    assert (EXAMPLE / "embedding_config.yml").read_text() == slots
    assert sum(len(text.splitlines()) for text in (train, loader, slots)) <= 60


def test_the_dlrm_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On hex strings as Criteo's; a category of C1 decides. The second run has nothing left to train."""
    for name in ("train.py", "embedding_config.yml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    (tmp_path / "criteo").mkdir()
    random = np.random.default_rng(0)
    size = 6144
    for day in range(5):
        categories = {name: random.integers(50, size=size) for name in IDS}
        columns = {"label": categories["C1"] % 2}
        columns |= {name: random.lognormal(size=size).astype(np.float32) for name in DENSE}
        columns |= {name: np.array([f"{i:08x}" for i in range(50)])[ids] for name, ids in categories.items()}
        parquet.write_table(pa.table(columns), tmp_path / "criteo" / f"day_{day}.parquet")
    run(tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert float(printed.split("step 81: auc ")[1].split(",")[0]) > 0.9
    run(tmp_path, monkeypatch)
    assert capsys.readouterr().out.startswith("step 81: resumed from ")
