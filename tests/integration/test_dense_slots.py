"""Slots in the dense model in a cluster: exact for any number of ranks, and moved by a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

DENSE = {"placement": "dense"}


def config(*dense: str) -> dict[str, Any]:
    rows = {"user": 50, "items": 200}
    slots = {
        name: {"dim": 8, "cardinality": count, **(DENSE if name in dense else {})}
        for name, count in rows.items()
    }
    return {"slots_config": slots}


def test_two_ranks_train_what_one_does(run_job: Any) -> None:
    options = {"script": "placed.py", "loaders": [24], "embedding_config": config("user", "items")}
    first, second = run_job(nproc=2, parameter_servers=2, **options).reports
    (alone,) = run_job("--accumulate", "2", **options).reports
    assert first["rows"] == 0
    # The last parameters are the rows of both slots.
    assert [len(values) for values in first["parameters"][-2:]] == [50 * 8, 200 * 8]
    assert first["parameters"] == second["parameters"]
    for two, one in zip(first["parameters"], alone["parameters"], strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-4)


def test_a_load_moves_slots_either_way(run_job: Any, tmp_path: Path) -> None:
    before: dict[str, Any] = {}
    for number, dense in enumerate([(), ("user", "items"), ("items",), ()]):
        arguments = ["--dump", str(tmp_path / str(number))]
        if before:
            arguments += ["--load", str(tmp_path / str(number - 1))]
        options = {"loaders": [8], "nproc": 2, "parameter_servers": 2, "embedding_config": config(*dense)}
        reports = run_job(*arguments, script="placed.py", **options).reports
        for report in reports if before else ():
            np.testing.assert_allclose(report["loaded"], before["trained"], rtol=1e-4, atol=1e-5)
        before = reports[0]
