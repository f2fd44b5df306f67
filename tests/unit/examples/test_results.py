"""What an earlier run left goes before the next one starts; nothing else does."""

from __future__ import annotations

from pathlib import Path

from results import CHECKPOINT_FILES, FILES, remove_results


def leave_results(output: Path) -> None:
    (output / "checkpoint").mkdir(parents=True)
    (output / "checkpoint" / "dump-1").mkdir()
    (output / "checkpoint" / "dump-1" / "dense.pt").write_text("of an earlier run", encoding="utf-8")
    for name in (*FILES, *(f"checkpoint/{name}" for name in CHECKPOINT_FILES)):
        (output / name).write_text("of an earlier run", encoding="utf-8")


def test_results_are_removed_and_prepared_data_is_kept(tmp_path: Path) -> None:
    leave_results(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset.json").write_text("{}", encoding="utf-8")
    remove_results(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        "data/dataset.json"
    ]
    assert not (tmp_path / "checkpoint").exists()


def test_files_of_somebody_else_are_kept(tmp_path: Path) -> None:
    leave_results(tmp_path)
    mine = tmp_path / "checkpoint" / "best.pt"
    mine.write_text("mine", encoding="utf-8")
    remove_results(tmp_path)
    assert list((tmp_path / "checkpoint").iterdir()) == [mine]


def test_a_first_run_has_nothing_to_remove(tmp_path: Path) -> None:
    remove_results(tmp_path / "new")
    assert not (tmp_path / "new").exists()
