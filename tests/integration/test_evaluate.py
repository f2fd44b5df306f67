"""`persia-launcher evaluate` against a real server of a small DLRM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from persia.ctx import TrainCtx
from persia.data import FeatureSpec, SplitBinaryBatches, SyntheticClicks
from persia.embedding.optim import SGD
from persia.errors import UnavailableError
from persia.launcher import cli
from persia.models import DLRM
from persia.nn import ClickMetrics
from persia.serving.evaluation import PredictionClient
from persia.train import Trainer
from tests.ports import free_port

CLICKS = SyntheticClicks([50, 4], num_batches=4, batch_size=64, num_numerical=3, seed=5)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, float]]:
    """Address of the server, folder of the data, and the AUC by the training context."""
    folder = tmp_path_factory.mktemp("served")
    CLICKS.write_split_binary(str(folder / "data"), "test")
    spec = FeatureSpec.load(folder / "data")
    torch.manual_seed(1)
    model = DLRM(3, 2, 4, bottom_mlp_sizes=[8, 4], top_mlp_sizes=[8, 1])
    dense = torch.optim.SGD(model.parameters(), 0.5)
    trainer = Trainer(CLICKS, CLICKS, epochs=5)
    with TrainCtx(SGD(0.5), dense, model=model, slots=spec.slots(4), mixed_precision=False) as ctx:
        fit = trainer.fit(ctx)
        ctx.dump_checkpoint(str(folder / "model"), with_jit_model=True)
    (folder / "slots.yml").write_text(yaml.safe_dump(spec.slots(4)))
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "persia.launcher", "serve", str(folder / "model"), "--model-name", "m"]
    command += ["--embedding-config", str(folder / "slots.yml"), "--port", address.rpartition(":")[2]]
    command += ["--max-batch-size", "128"]
    with open(folder / "serve.log", "w") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            with PredictionClient(address, "m", wait_s=240):
                pass
            yield address, str(folder / "data"), fit.best["auc"]
        finally:
            server.terminate()


def evaluate(what: str, served: tuple[str, str, float], *flags: str) -> Result:
    address, data, _ = served
    words = ["evaluate", what, data, "--address", address, "--model-name", "m", *flags]
    return CliRunner().invoke(cli, words)


def test_accuracy_is_that_of_the_trained_model(served: tuple[str, str, float]) -> None:
    (found,) = json.loads(evaluate("accuracy", served, "--batch-size", "100", "--json").stdout)
    assert found["num_samples"] == 256
    assert found["auc"] > 0.6
    assert found["auc"] == pytest.approx(served[2], abs=1e-4)
    (first,) = json.loads(
        evaluate("accuracy", served, "--batch-size", "100", "--max-steps", "1", "--json").stdout
    )
    assert first["num_samples"] == 100


def test_predictions_are_logits_unless_the_caller_says_otherwise(served: tuple[str, str, float]) -> None:
    batch = SplitBinaryBatches(served[1], "test", batch_size=100).make(0, requires_grad=False)
    with PredictionClient(served[0], "m") as client:
        logits = client.predict(batch.to_bytes())
    assert logits.shape == (100,)
    assert logits.min() < 0
    metrics = ClickMetrics(100, from_logits=True)
    metrics.update(torch.from_numpy(logits), torch.from_numpy(batch.labels[0].data))
    flags = ("--batch-size", "100", "--max-steps", "1", "--json")
    (found,) = json.loads(evaluate("accuracy", served, *flags).stdout)
    assert found["log_loss"] == pytest.approx(metrics.compute().log_loss)
    (other,) = json.loads(evaluate("accuracy", served, "--probabilities", *flags).stdout)
    assert other["log_loss"] != pytest.approx(found["log_loss"])


def test_latency_of_each_batch_size(served: tuple[str, str, float]) -> None:
    flags = ("--batch-sizes", "1,64", "--requests", "30", "--concurrency", "3")
    rows = json.loads(evaluate("latency", served, *flags, "--json").stdout)
    assert [(row["batch_size"], row["concurrency"], row["num_requests"]) for row in rows] == [
        (1, 3, 30),
        (64, 3, 30),
    ]
    for row in rows:
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p95_ms"] <= row["p99_ms"]
    table = evaluate("latency", served, *flags).stdout
    assert all(word in table for word in ("batch size", "samples per s", "p99 ms"))


@pytest.mark.parametrize(
    ("what", "flags", "message"),
    [
        ("accuracy", ["--batch-size", "129"], "INVALID_ARGUMENT: the batch has 129 samples"),
        ("latency", ["--batch-sizes", "big"], "'big' is no list of whole numbers from 1, like 256,1024"),
        ("latency", ["--batch-sizes", "256,0"], "'256,0' is no list of whole numbers from 1"),
        ("latency", ["--batch-sizes", "300"], "has 256 rows, fewer than a batch of 300"),
        ("accuracy", ["--mapping", "train"], "there is no file"),
        ("accuracy", ["--model-name", "other"], "NOT_FOUND: there is no model 'other': this server has 'm'"),
        (
            "latency",
            ["--model-name", "other", "--batch-sizes", "64"],
            "NOT_FOUND: there is no model 'other': this server has 'm'",
        ),
    ],
)
def test_what_cannot_be_measured_is_named(
    what: str, flags: list[str], message: str, served: tuple[str, str, float]
) -> None:
    result = evaluate(what, served, *flags)
    assert result.exit_code
    assert message in " ".join(result.output.split())


def test_no_server_is_named() -> None:
    with pytest.raises(UnavailableError, match="no server answers at 127.0.0.1:1 within 0.1 s: start"):
        PredictionClient("127.0.0.1:1", wait_s=0.1)
