"""Wrong values of options end with what is right, before anything is measured."""

from __future__ import annotations

import importlib
import sys

import pytest

WRONG = {
    "batches": ["--batch-size=0", "--features=x", "--repetitions=-1"],
    "builds": ["--turns=0", "--seconds=0", "--core=-1"],
    "checkpoints": [
        *("--rows=99", "--dim=0", "--dim=65537", "--servers=0", "--repeats=0", "--blocks=-1"),
        *("--batch-size=1.5", "--dump-percent=0", "--dump-percent=101", "--directory=missing"),
    ],
    "consistency.__main__": ["--seeds=0", "--delay=-1", "--mode=none"],
    "first_step": ["--rounds=0", "--allow=0"],
    "freshness": ["--seconds=0", "--rows=0", "--rate=nan"],
    "incremental": [
        *("--rows=0", "--dim=0", "--seconds=inf", "--steps-per-second=0", "--repeats=0"),
        "--directory=missing",
    ],
    "__main__": ["--processes=0", "--rounds=0", "--seconds=0", "--cores=none", "--rpc-bench=missing"],
    "model_metrics": ["--batch=0", "--window=0", "--every=0", "--rounds=0"],
    "observability_cost": ["--batch-size=0", "--blocks=0", "--steps=0"],
    "packet_traffic": ["--rate=0"],
    "planned": ["--servers=-1", "--batch-size=0", "--batches=99", "--dim=0"],
    "row_dtype": ["--updates=0", "--size=0", "--steps=0", "--judged=0", "--seeds=0"],
    "security": ["--connections=0", "--rate=0", "--hosts=251", "--rounds=0", "--seconds=0"],
    "serving": ["--rates=0", "--seconds=0", "--core=4096", "--core=x", "--rows=25", "--prepare"],
    "soak": ["--steps=999", "--seconds=0", "--allow-kib=-1", "--seed=-1"],
    "tiers.__main__": [
        *("--rows=0", "--rows=25", "--slots=0", "--dim=0", "--batch-size=0", "--exponent=0", "--exponent=1"),
        *("--settle=-1", "--cache=0", "--cache=1.1", "--cache=0.00001", "--kind=dram", "--job=none"),
        *("--seconds=0", "--rounds=0", "--checkpoint-every=0", "--directory=missing"),
    ],
}
POSITIONAL = {"packet_traffic": "missing", "serving": "wide"}


@pytest.mark.parametrize(
    ("program", "argument"), [(program, argument) for program in WRONG for argument in WRONG[program]]
)
def test_a_wrong_value_is_named(
    program: str, argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{program}")
    required = [POSITIONAL[program]] if program in POSITIONAL else []
    monkeypatch.setattr(sys, "argv", [program, argument, *required])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    option, _, _ = argument.partition("=")
    error = capsys.readouterr().err.splitlines()[-1].lower()
    assert "error: " in error or "invalid value" in error
    assert option in error
