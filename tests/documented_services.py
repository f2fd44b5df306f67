"""The same as documented_pages.py, for the pages about serving and security."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from persia.ctx import TrainCtx
from persia.embedding.data import IDTypeFeature, NonIDTypeFeature, PersiaBatch
from tests.documented_stage import (
    SLOTS,
    TIMEOUT_S,
    Stage,
    around,
    make_batch,
    running_job,
    script,
)
from tests.ports import free_port


def prepare(stage: Stage) -> None:
    """The slots of a job that is served, whose page is left out without a client."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own
        pytest.importorskip("tritonclient.grpc")
    (stage.folder / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS))


@contextmanager
def trained_job(stage: Stage) -> Iterator[TrainCtx]:
    """The script's context, with a row of user 7, and features that its checkpoints name."""
    script(stage)
    with stage.names["TrainCtx"]() as ctx:
        ctx.set_embedding("user", np.array([7], np.uint64), np.ones((1, 16), np.float32))
        ctx.forward(ctx.get_embedding_from_data(make_batch(requires_grad=False)))
        yield ctx


@around("serving.md")
def _(stage: Stage) -> Iterator[None]:
    """A checkpoint of a trained row; the server listens on a free port."""
    prepare(stage)
    address = f"127.0.0.1:{free_port()}"
    stage.replaced = {
        "127.0.0.1:8001": address,
        "client_timeout=1.0": f"client_timeout={TIMEOUT_S}",  # other tests may keep this machine busy
        "serve model/ --model": f"serve model/ --port {address.rpartition(':')[2]} --model",
    }
    with trained_job(stage) as ctx:
        stage.names["ctx"] = SimpleNamespace(dump_checkpoint=partial(ctx.dump_checkpoint, step=10_000))
        yield


@around("serving_operations.md")
@around("serving_export.md")
def _(stage: Stage) -> Iterator[None]:
    """The checkpoint that the page about serving has written."""
    prepare(stage)
    with trained_job(stage) as ctx:
        ctx.dump_checkpoint("model/", with_jit_model=True, keep_last=3)
    yield


def wait_until_ready(stage: Stage, address: str) -> None:
    """Waits for the server of predictions that was started last."""
    triton = importlib.import_module("tritonclient.grpc")
    client = triton.InferenceServerClient(address)
    end, is_ready = time.monotonic() + TIMEOUT_S, False
    while not is_ready and time.monotonic() < end:
        assert stage.background[-1].poll() is None, (stage.folder / "background.log").read_text()
        time.sleep(0.05)
        with suppress(triton.InferenceServerException):
            is_ready = client.is_server_ready()
    client.close()


@around("serving.md", "InferenceServerClient(")
def _(stage: Stage) -> Iterator[None]:
    stage.names |= {"users": [np.array([7], np.uint64)], "ages": np.ones((1, 1), np.float32)}
    wait_until_ready(stage, stage.replaced["127.0.0.1:8001"])
    yield
    expected = stage.names["model"]([torch.ones(1, 1)], [torch.ones(1, 16)])
    assert stage.names["probabilities"].tolist() == expected.tolist()


@around("serving.md", "Predictor(")
def _(stage: Stage) -> Iterator[None]:
    stage.names["message"] = make_batch(requires_grad=False).to_bytes()
    yield
    assert stage.names["probabilities"].shape == (3, 1)
    assert stage.names["predictor"].embeddings.num_missing == 3


@around("serving_clients.md")
def _(stage: Stage) -> Iterator[None]:
    """A model that was trained on named features; the server listens on free ports."""
    prepare(stage)
    port, http_port = free_port(), free_port()
    stage.replaced = {
        "127.0.0.1:8001": f"127.0.0.1:{port}",
        "127.0.0.1:8000": f"127.0.0.1:{http_port}",
        "--http-port 8000": f"--port {port} --http-port {http_port}",
        "curl -sS ": "curl -sS --fail-with-body --retry 100 --retry-connrefused --retry-delay 1 ",
    }
    script(stage)
    with stage.names["TrainCtx"]() as ctx:
        ctx.set_embedding("user", np.array([7, 8], np.uint64), np.ones((2, 16), np.float32))
        batch = PersiaBatch(
            [IDTypeFeature("user", [np.array([7], np.uint64)])],
            [NonIDTypeFeature(np.ones((1, 1), np.float32), "age")],
            requires_grad=False,
        )
        ctx.forward(ctx.get_embedding_from_data(batch))
        ctx.dump_checkpoint("model/", with_jit_model=True)
    yield
    model = stage.names["model"].cpu()
    ages, rows = torch.tensor([[31.0], [54.0]]), torch.tensor([[1.0] * 16, [2.0] * 16])
    expected = model([ages], [rows]).detach().numpy()
    np.testing.assert_allclose(stage.names["probabilities"], expected, rtol=1e-6)
    stage.names["client"].close()


@around("criteo.md", "preprocess 'raw/day_?.gz'")
def _(stage: Stage) -> Iterator[None]:
    """A log of 24 days, with one record each; `--output` is in the folder of the page."""
    (stage.folder / "raw").mkdir()
    record = "\t".join(["1", *["5"] * 13, *["68fd1e64"] * 26]) + "\n"
    for day in range(24):
        with gzip.open(stage.folder / "raw" / f"day_{day}.gz", "wt") as file:
            file.write(record)
    stage.replaced = {"/data/criteo": "criteo", "pip install": ": install"}
    yield
    assert (stage.folder / "criteo" / "feature_spec.yaml").is_file()
    stage.replaced = {}


@around("security.md", "http://ADDRESS/metrics")
def _(stage: Stage) -> Iterator[None]:
    script(stage)
    with running_job(stage):
        command = [sys.executable, "-m", "persia.launcher", "status", "--targets"]
        # Not in the folder of the page, where a `persia` of earlier blocks may hide the package.
        found = json.loads(subprocess.check_output(command, env=os.environ | stage.job, text=True, cwd="/"))
        stage.replaced = {"ADDRESS": found[0]["targets"][0], "curl ": "curl --fail "}
        yield
    stage.replaced, stage.job = {}, {}


@around("security.md", "secret show --role loader")
def _(stage: Stage) -> Iterator[None]:
    """Both machines are this one: the second takes what the first has printed."""
    stage.job = {"XDG_CONFIG_HOME": str(stage.folder)}
    stage.replaced = {
        "persia1.job.…": "$(persia-launcher secret show)",
        "monitoring/prometheus/token": "token",
    }
    yield
    assert (stage.folder / "token").read_text().strip()
    stage.replaced, stage.job = {}, {}


@around("security.md", "secret create --replace")
def _(stage: Stage) -> Iterator[None]:
    stage.job = {"XDG_CONFIG_HOME": str(stage.folder)}
    yield
    assert (stage.folder / "persia" / "job_secret").is_file()


@around("serving_operations.md", "--gate samples.bin")
def _(stage: Stage) -> Iterator[None]:
    """A server that loads its first version answers the samples; one that cannot ends at once."""
    (stage.folder / "samples.bin").write_bytes(make_batch(requires_grad=False).to_bytes())
    port = free_port()
    stage.replaced |= {"--gate samples.bin": f"--port {port} --gate samples.bin"}
    yield
    wait_until_ready(stage, f"127.0.0.1:{port}")


@around("serving_export.md", "export model/ exported/")
def _(stage: Stage) -> Iterator[None]:
    yield
    assert (stage.folder / "exported" / "model.pt").is_file()
    assert (stage.folder / "repository" / "ads" / "config.pbtxt").is_file()


@around("serving.md", "secret token --for serve")
def _(stage: Stage) -> Iterator[None]:
    stage.replaced |= {"curl ": "curl --fail --retry 100 --retry-connrefused --retry-delay 1 "}
    yield
