"""Where the demo takes its data from, without starting anything."""

from __future__ import annotations

import subprocess
import sys
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


def test_a_cluster_that_fails_names_the_process_and_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Procfile").write_text("server: sleep 60\nrank: sh -c 'echo the reason; exit 7'\n", "utf-8")
    monkeypatch.setattr(demo, "REPOSITORY", tmp_path)
    failure = demo.train_on_cluster(tmp_path)
    assert demo.report(failure) == 7
    shown = capsys.readouterr()
    assert "rank.1 ended first, with exit code 7" in shown.err
    assert "the reason" in shown.err
    assert "the reason" in shown.out
    assert "the reason" in (tmp_path / "cluster.log").read_text(encoding="utf-8")


def test_steps_of_the_cluster_are_recognised() -> None:
    line = "12:00:00 nn-worker.1          | step 25/254  loss 0.3210  in flight 4  20,000 samples/s"
    match = demo.STEP.fullmatch(line)
    assert match is not None
    assert match.groupdict() == {
        "step": "25",
        "steps": "254",
        "text": "loss 0.3210  in flight 4  20,000 samples/s",
    }
    assert demo.STEP.fullmatch("12:00:00 nn-worker.1 | step 50/254  test AUC 0.8901234") is None


def test_chatter_of_the_broker_goes_to_the_log_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "12:00:00 nats.1               | [17] [WRN] Maximum payloads over 8.00 MB are generally discouraged",
        "12:00:00 nats.1               | [17] [FTL] no such file",
        "12:00:00 nn-worker.1          | step 25/254",
    ]
    with demo.shown(tmp_path / "cluster.log") as show:
        for line in lines:
            show(line)
    assert capsys.readouterr().out.splitlines() == lines[1:]
    assert (tmp_path / "cluster.log").read_text(encoding="utf-8").splitlines() == lines


@pytest.mark.parametrize("has_cuda", [False, True])
def test_training_in_one_process_runs_with_cuda_and_without(
    has_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA works in no fork of a process that has used it."""
    source = """if True:
        import json, os, sys
        from pathlib import Path
        folder = Path(os.environ["ADULT_OUTPUT"])
        (folder / "summary.json").write_text(json.dumps({"is_fork": "demo" in sys.modules}))
        print("logged", file=sys.stderr)
        sys.exit(len(list(folder.glob("fail"))) * 3)
    """
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(demo, "HERE", tmp_path)
    monkeypatch.setattr(demo, "import_torch", lambda: has_cuda)
    output = tmp_path / "output"
    summary = demo.train_alone(output, tmp_path)
    assert summary["is_fork"] == (not has_cuda)
    assert (output / "train.log").read_text() == "logged\n"
    (output / "fail").touch()
    failure = demo.train_alone(output, tmp_path)
    assert (failure.exit_code, failure.last_lines) == (3, ["logged"])


def test_looking_for_cuda_does_not_begin_to_use_it() -> None:
    """Else the fork could not use it."""
    source = "import demo, os; demo.import_torch(); print(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=demo.HERE, capture_output=True, text=True, timeout=280, check=True
    )
    assert done.stdout == "1\n"
