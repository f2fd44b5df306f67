"""History files and the picture drawn from them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from history import HistoryWriter, read_history

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_history(path: Path) -> None:
    with closing(HistoryWriter(path)) as history:
        history.write(1, loss=0.7, staleness=1, samples_per_second=0.0)
        history.write(2, loss=0.5, staleness=3, samples_per_second=9000.0)
        history.write(2, test_auc=0.88)


def test_curves_have_their_own_steps(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.jsonl"
    write_history(path)
    curves = read_history(path)
    assert (curves["loss"].steps, curves["loss"].values) == ([1, 2], [0.7, 0.5])
    assert (curves["test_auc"].steps, curves["test_auc"].values) == ([2], [0.88])


def test_a_record_can_be_read_before_the_run_ends(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with closing(HistoryWriter(path)) as history:
        history.write(1, loss=0.7)
        assert read_history(path)["loss"].values == [0.7]


@pytest.mark.parametrize("line", ['{"step": 1', '{"loss": 1}', "[1]", "7", '{"step": 1, "loss": null}'])
def test_anything_else_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"history\.jsonl, line 2"):
        read_history(path)


@pytest.mark.parametrize(("dataset", "best_auc"), [("adult", None), ("generated", 0.91)])
def test_the_picture_is_drawn(tmp_path: Path, dataset: str, best_auc: float | None) -> None:
    plots = pytest.importorskip("plots", reason="needs matplotlib (the 'examples' extra)")
    write_history(tmp_path / "history.jsonl")
    plots.draw(tmp_path / "history.jsonl", tmp_path / "curves.png", dataset, best_auc)
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG_SIGNATURE)


def test_a_run_that_failed_before_its_first_step_can_be_drawn(tmp_path: Path) -> None:
    plots = pytest.importorskip("plots", reason="needs matplotlib (the 'examples' extra)")
    (tmp_path / "history.jsonl").touch()
    plots.draw(tmp_path / "history.jsonl", tmp_path / "curves.png", "adult")
    assert (tmp_path / "curves.png").is_file()
