"""Asks a running server for a prediction of every test row, over gRPC, and prints their AUC.

    persia-launcher serve build/demo/checkpoint --model-name adult \\
        --embedding-config examples/adult_income/config/embedding_config.yml
    python examples/adult_income/serving/client.py --data build/demo/data

Needs `pip install 'tritonclient[grpc]'`; any client of the Open Inference Protocol will do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the example's other scripts

from batches import to_persia_batch
from dataset import DEFAULT_DIRECTORY, Split, load_split
from metrics import roc_auc


def predict(client: triton.InferenceServerClient, model: str, split: Split) -> Any:
    """The probabilities of `split`, float32 [rows, 1]; a request of at most 128 rows at a time."""
    answers = []
    for batch in split.batches():
        message = to_persia_batch(batch, requires_grad=False).to_bytes()
        tensor = triton.InferInput("batch", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([message], dtype=object))
        answers.append(client.infer(model, [tensor], client_timeout=30).as_numpy("output_0"))
    return np.concatenate(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Test AUC through a server of the adult-income model.")
    parser.add_argument("--address", default="127.0.0.1:8001", help="host:port of the server")
    parser.add_argument("--model", default="adult", help="the server's --model-name")
    parser.add_argument("--data", type=Path, default=DEFAULT_DIRECTORY, help="directory of the prepared data")
    arguments = parser.parse_args()
    split = load_split(arguments.data, "test")
    client = triton.InferenceServerClient(arguments.address)
    auc = roc_auc(split.labels, predict(client, arguments.model, split))
    print(f"test AUC {auc:.7f} of {len(split):,} rows")


if __name__ == "__main__":
    main()
