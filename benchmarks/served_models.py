"""The models whose serving is measured: two versions of each in a folder, and requests to ask them with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import List  # noqa: UP035 - torch.jit.script resolves typing.List

import numpy as np
import torch
import yaml

from persia.ctx import TrainCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.serving.protocol import message
from persia.storage.location import Location
from persia.storage.manifest import MANIFEST_NAME, Manifest
from persia.storage.versions import version_name

__all__ = ["MODELS", "prepare", "requests", "use_version"]

NUM_SLOTS = 26
NUM_DENSE = 13
DIM = 16
SLOTS = {"slots_config": {f"slot_{i}": {"dim": DIM} for i in range(NUM_SLOTS)}}
NUM_REQUESTS = 200
_ADULT = Path(__file__).resolve().parents[1] / "examples" / "adult_income"


class Wide(torch.nn.Module):
    """The size of a small click model: 26 slots of dim 16, 13 dense columns, two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(NUM_DENSE + NUM_SLOTS * DIM, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 1),
            torch.nn.Sigmoid(),
        )

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        output: torch.Tensor = self.layers(torch.cat(dense + embeddings, dim=1))
        return output


def prepare(model: str, folder: Path, num_rows: int) -> None:
    """Writes `folder`/model with versions 1 and 2, `folder`/embedding_config.yml and `folder`/batches/.

    `num_rows`: of all slots of the wide model together. The versions have the same rows, each its own load.
    """
    (folder / "batches").mkdir()
    for number, batch in enumerate(MODELS[model](folder, num_rows)):
        (folder / "batches" / f"{number}.bin").write_bytes(batch)
    first, second = (folder / "model" / version_name(step) for step in (1, 2))
    shutil.copytree(first, second, copy_function=os.link)
    for step, version in ((1, first), (2, second)):
        _number(version / MANIFEST_NAME, step)
    use_version(folder, 1)


def _number(path: Path, step: int) -> None:
    """Makes it the manifest of `step`."""
    manifest, _ = Manifest.read(Location.of(path.parent))
    path.unlink()  # it may be a link of another version's
    assert manifest.embeddings is not None, "the models have rows"
    # Versions with the same rows would share them, and load none.
    rows = replace(manifest.embeddings, created_at=f"step {step}")
    path.write_bytes(replace(manifest, step=step, embeddings=rows).encode())


def use_version(folder: Path, step: int) -> None:
    """The server takes it when it next looks."""
    (Location.of(folder / "model") / "latest").replace(version_name(step).encode())


def requests(folder: Path) -> list[bytes]:
    """Encoded ModelInferRequests."""
    made = []
    for path in sorted((folder / "batches").iterdir()):
        request = message("ModelInferRequest")(model_name="model")
        tensor = request.inputs.add(name="batch", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(path.read_bytes())
        made.append(request.SerializeToString())
    return made


def _wide(folder: Path, num_rows: int) -> Iterator[bytes]:
    """Random rows; requests of 32 samples whose IDs are there."""
    rows_a_slot = num_rows // NUM_SLOTS
    model = Wide()
    generator = np.random.default_rng(0)
    (folder / "embedding_config.yml").write_text(yaml.safe_dump(SLOTS, sort_keys=False))
    with TrainCtx(
        SGD(0.1),
        torch.optim.SGD(model.parameters(), 0.1),
        model=model,
        mixed_precision=False,
        slots=SLOTS,
        global_config={"embedding_parameter_server_config": {"capacity": 2 * num_rows}},
    ) as ctx:
        for slot in SLOTS["slots_config"]:
            rows = generator.normal(scale=0.01, size=(rows_a_slot, DIM)).astype(np.float32)
            ctx.set_embedding(slot, np.arange(rows_a_slot, dtype=np.uint64), rows)
        ctx.dump_checkpoint(str(folder / "model"), with_jit_model=True, step=1, keep_last=2)
    for _ in range(NUM_REQUESTS):
        yield PersiaBatch(
            [
                IDTypeFeatureWithSingleID(slot, generator.integers(0, rows_a_slot, 32, np.uint64))
                for slot in SLOTS["slots_config"]
            ],
            [NonIDTypeFeature(generator.random((32, NUM_DENSE), np.float32))],
            requires_grad=False,
        ).to_bytes()


def _adult(folder: Path, _num_rows: int) -> Iterator[bytes]:
    """The example, trained on generated data; requests of 128 test rows."""
    output, data = folder / "run", folder / "data"
    environment = {**os.environ, "ADULT_DATA": str(data), "ADULT_OUTPUT": str(output)}
    for script in (["prepare_data.py", "--generate", "--output", str(data)], ["train.py"]):
        command = [sys.executable, str(_ADULT / script[0]), *script[1:]]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    shutil.copy(_ADULT / "config" / "embedding_config.yml", folder)
    shutil.copytree(output / "checkpoint", folder / "model" / version_name(1))
    sys.path.insert(0, str(_ADULT))
    from batches import to_persia_batch  # type: ignore[import-not-found]
    from dataset import load_split  # type: ignore[import-not-found]

    batches = load_split(data, "test").batches()[:-1]  # the last is short
    for index in range(NUM_REQUESTS):
        yield to_persia_batch(batches[index % len(batches)], requires_grad=False).to_bytes()


MODELS: dict[str, Callable[[Path, int], Iterator[bytes]]] = {"adult": _adult, "wide": _wide}
