"""A training that goes on with a served model at a steady rate, for servers that follow its packets.

    python -m benchmarks.packet_traffic FOLDER --rate 50

`FOLDER` is one that `python -m benchmarks.serving MODEL --folder FOLDER --prepare` has written; packets go to
its folder `packets`, all settings at their defaults. It trains on the requests' own samples, until it is told
to stop.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.arguments import number
from persia.checkpoint.checkpoints import Source
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import optim
from persia.embedding.data import Label, PersiaBatch

__all__ = ["PACKETS"]

PACKETS = "packets"


class Samples(IterableDataset):
    """The batches in `folder`, again and again."""

    def __init__(self, folder: Path, rate: float) -> None:
        super().__init__(buffer_size=2)
        self._messages = [path.read_bytes() for path in sorted(folder.iterdir())]
        self._rate = rate

    def __iter__(self) -> Iterator[PersiaBatch]:
        due = time.monotonic()
        for message in itertools.cycle(self._messages):
            request = PersiaBatch.from_bytes(message)
            labels = [Label(np.zeros((request.batch_size, 1), np.float32))]
            yield PersiaBatch(request.id_type_features, request.non_id_type_features, labels)
            due += 1 / self._rate
            time.sleep(max(0.0, due - time.monotonic()))


def train(folder: Path, rate: float) -> None:
    source = Source(folder / "model")
    section = source.manifest.embeddings
    assert section is not None, "it is prepared so"
    assert section.optimizer is not None, "a TrainCtx has written it"
    settings = dict(section.optimizer)
    embedding_optimizer = getattr(optim, settings.pop("name"))(**settings)
    model = torch.jit.load(str(source.location / "jit_dense.pt"))  # type: ignore[no-untyped-call]
    stopped: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    packets = {"enable_incremental_update": True, "incremental_dir": str(folder / PACKETS)}
    with TrainCtx(
        embedding_optimizer,
        torch.optim.SGD(model.parameters(), 1e-3),
        model=model,
        mixed_precision=False,
        slots=folder / "embedding_config.yml",
        global_config={"embedding_parameter_server_config": {**packets, "capacity": 2 * section.num_rows}},
    ) as ctx:
        ctx.load_embedding(str(source.location))
        for batch in DataLoader(Samples(folder / "batches", rate)):
            output, _ = ctx.forward(batch)
            ctx.backward(output.mean())
            if stopped:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=number(above=0), default=50.0, help="training steps a second")
    options = parser.parse_args()
    if not (options.folder / "batches").is_dir():
        parser.error(f"{options.folder} has no batches: let benchmarks.serving --prepare write it")
    train(options.folder, options.rate)


if __name__ == "__main__":
    main()
