"""Where the demo takes its data from, without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataset import load_info

pytest.importorskip("honcho", reason="needs honcho (the 'examples' extra)")
demo = pytest.importorskip("demo", reason="needs matplotlib (the 'examples' extra)")


def refuse(*_: object) -> None:
    raise AssertionError("the data was prepared again")


def test_data_of_an_earlier_run_is_used_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = demo.obtain(tmp_path, None, generated=True)
    assert "prepared earlier" not in capsys.readouterr().out
    monkeypatch.setattr(demo, "prepare", refuse)
    assert demo.obtain(tmp_path, None, generated=True) == info == load_info(tmp_path)
    assert capsys.readouterr().out.count("prepared earlier") == 1
    with pytest.raises(AssertionError):
        demo.obtain(tmp_path, None, generated=False)


def test_a_run_without_data_leaves_no_results_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "curves.png"
    picture.write_bytes(b"of an earlier run")
    assert demo.run(tmp_path, tmp_path / "no such folder", generated=False) == 1
    assert "neither" in capsys.readouterr().err
    assert not picture.exists()
