"""How predictions scale with threads of one process: python -m benchmarks.predict_threads FOLDER

FOLDER is what `python -m benchmarks.serving wide --folder FOLDER --prepare` wrote. Threads decode a batch and
predict it, as those of a server do, without its port.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

import torch

from benchmarks.own_core import preferred
from benchmarks.served_models import NUM_REQUESTS
from persia.config import load_embedding_config
from persia.embedding.data import IDTypeFeatureWithSingleID, NonIDTypeFeature, PersiaBatch
from persia.serving.predictor import ModelSettings
from persia.serving.versions import ServedModel
from persia.storage.location import Location

_WARM_S, _SECONDS = 0.3, 1.5


def _batch(folder: Path, repeats: int) -> bytes:
    """The samples of one request, so many times."""
    read = PersiaBatch.from_bytes((folder / "batches" / f"{NUM_REQUESTS - 1}.bin").read_bytes())
    ids = [IDTypeFeatureWithSingleID(f.name, f.ids.repeat(repeats)) for f in read.id_type_features]
    dense = [NonIDTypeFeature(f.data.repeat(repeats, axis=0)) for f in read.non_id_type_features]
    return PersiaBatch(ids, dense, requires_grad=False).to_bytes()


def _measure(model: ServedModel, message: bytes, num_threads: int) -> tuple[float, float]:
    """Batches/s, and the cores that were used."""
    counts, stopped = [0] * num_threads, threading.Event()

    def predict(thread: int) -> None:
        while not stopped.is_set():
            model.predict(PersiaBatch.from_bytes(message))
            counts[thread] += 1

    threads = [threading.Thread(target=predict, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    with preferred([os.getpid()]):
        time.sleep(_WARM_S)
        before, cpu_s, began_s = sum(counts), time.process_time(), time.perf_counter()
        time.sleep(_SECONDS)
        took_s = time.perf_counter() - began_s
        found = (sum(counts) - before) / took_s, (time.process_time() - cpu_s) / took_s
    stopped.set()
    for thread in threads:
        thread.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = arguments.folder
    slots = load_embedding_config(str(folder / "embedding_config.yml"))
    model = ServedModel(ModelSettings(name="model", location=Location.of(folder / "model"), slots=slots))
    for repeats in (1, 8, 32):
        message = _batch(folder, repeats)
        for _ in range(arguments.turns):
            for num_threads in (1, 2):
                rate, cores = _measure(model, message, num_threads)
                what = f"{32 * repeats:5} samples, {num_threads} threads"
                print(f"{what}: {rate:6.0f} batches/s, {cores:.2f} cores")
    model.close()


if __name__ == "__main__":
    main()
