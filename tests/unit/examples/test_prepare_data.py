"""Preparation as a whole: real or generated, and never one under the name of the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from adult import BUNDLED, SHA256, ChecksumError, read_source
from dataset import DatasetInfo, Split, load_info, load_split, save_dataset
from generated import generate
from prepare_data import describe, ensure_prepared, prepare, prepared

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "adult_income" / "prepare_data.py"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "ADULT_SOURCE"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def save_tiny(directory: Path, dataset: Literal["adult", "generated"]) -> DatasetInfo:
    split = Split(
        ids=np.zeros((2, 8), np.uint64),
        dense=np.zeros((2, 5), np.float32),
        labels=np.ones((2, 1), np.float32),
    )
    info = DatasetInfo(dataset=dataset, train_rows=2, test_rows=2, num_categories={}, best_auc=None)
    save_dataset(directory, info, split, split)
    return info


@pytest.mark.parametrize("generated", [False, True])
def test_prepared_data_serves_the_same_request_again_and_no_other(tmp_path: Path, generated: bool) -> None:
    info = save_tiny(tmp_path, "generated" if generated else "adult")
    assert prepared(tmp_path, None, generated) == info
    assert prepared(tmp_path, None, not generated) is None


def test_a_local_copy_that_was_named_is_read_again(tmp_path: Path) -> None:
    save_tiny(tmp_path, "adult")
    assert prepared(tmp_path, tmp_path / "copy", generated=False) is None


def test_incomplete_data_is_prepared_again(tmp_path: Path) -> None:
    assert prepared(tmp_path / "none", None, generated=False) is None
    save_tiny(tmp_path, "adult")
    (tmp_path / "test.npz").unlink()
    assert prepared(tmp_path, None, generated=False) is None


def test_a_script_alone_prepares_adult_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ADULT_SOURCE", raising=False)
    ensure_prepared(tmp_path)
    assert load_info(tmp_path).dataset == "adult"
    assert capsys.readouterr().out.startswith("UCI Adult: 32,561 training")
    ensure_prepared(tmp_path)
    assert capsys.readouterr().out == ""


def test_generated_data_says_what_it_is(tmp_path: Path) -> None:
    info = prepare(tmp_path, None, generated=True)
    assert load_info(tmp_path) == info
    assert info.dataset == "generated"
    assert describe(info).startswith("Generated data (not Adult)")
    assert f"{info.best_auc:.4f}" in describe(info)
    assert len(load_split(tmp_path, "train")) == info.train_rows


def test_generated_data_is_the_same_for_a_seed_and_another_for_another() -> None:
    (info, train, _), (again, train_again, _) = generate(seed=1), generate(seed=1)
    assert info == again
    assert np.array_equal(train.ids, train_again.ids)
    assert np.array_equal(train.labels, train_again.labels)
    assert not np.array_equal(generate(seed=2)[1].labels, train.labels)


def test_generated_data_can_be_learnt_but_not_perfectly() -> None:
    info, train, _ = generate()
    assert info.best_auc is not None
    assert 0.85 < info.best_auc < 0.97
    assert 0.1 < train.labels.mean() < 0.5


def test_a_local_copy_is_verified(tmp_path: Path) -> None:
    (tmp_path / "adult.data").write_text("39, State-gov\n", encoding="utf-8")
    with pytest.raises(ChecksumError, match=str(tmp_path / "adult.data")):
        prepare(tmp_path / "out", tmp_path, generated=False)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_the_command_ends_with_one_clear_line_on_bad_input(tmp_path: Path) -> None:
    finished = run_script("--source", str(tmp_path), "--output", str(tmp_path / "out"))
    assert finished.returncode == 1
    assert finished.stderr.startswith("error: neither")
    assert "Traceback" not in finished.stderr


def test_the_command_needs_no_network_and_no_copy(tmp_path: Path) -> None:
    finished = run_script("--output", str(tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert "UCI Adult: 32,561 training and 16,281 test rows" in finished.stdout
    assert load_info(tmp_path).dataset == "adult"


def test_a_named_copy_is_used(tmp_path: Path) -> None:
    (tmp_path / "adult.data").write_bytes(read_source(BUNDLED, "adult.data"))
    shutil.copy(BUNDLED / "adult.test.xz", tmp_path)
    finished = run_script("--source", str(tmp_path), "--output", str(tmp_path / "out"))
    assert finished.returncode == 0, finished.stderr
    assert load_info(tmp_path / "out").dataset == "adult"


def test_the_readme_of_the_copy_has_its_checksums() -> None:
    text = (BUNDLED / "README.md").read_text(encoding="utf-8")
    for name, checksum in SHA256.items():
        assert f"| `{name}` | `{checksum}` |" in text
