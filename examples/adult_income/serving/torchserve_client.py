"""Asks a running TorchServe for a prediction of every test row, over gRPC or REST, and prints their AUC.

    pip install torchserve pyyaml        # and Java 17
    persia-launcher torchserve-archive build/demo/checkpoint --model-name adult --version 1 \\
        --embedding-config examples/adult_income/config/embedding_config.yml
    torchserve --start --ncs --ts-config examples/adult_income/serving/config.properties \\
        --model-store model_store --models adult=adult-1.mar
    python examples/adult_income/serving/torchserve_client.py --data build/demo/data --api grpc
    torchserve --stop

gRPC needs `pip install grpcio-tools`, which compiles torchserve.proto beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the example's other scripts

from batches import to_persia_batch
from dataset import DEFAULT_DIRECTORY, Split, load_split
from metrics import roc_auc

TIMEOUT_S = 30
DEFAULT_ADDRESSES = {"grpc": "127.0.0.1:7070", "rest": "127.0.0.1:8080"}

Ask = Callable[[bytes], bytes]  # a batch's bytes to the answer's


def over_grpc(address: str, model: str) -> Ask:
    messages, services = grpc.protos_and_services("torchserve.proto")
    service = services.InferenceAPIsServiceStub(grpc.insecure_channel(address))

    def ask(batch: bytes) -> bytes:
        request = messages.PredictionsRequest(model_name=model, input={"batch": batch})
        prediction: bytes = service.Predictions(request, timeout=TIMEOUT_S).prediction
        return prediction

    return ask


def over_rest(address: str, model: str) -> Ask:
    def ask(batch: bytes) -> bytes:
        request = urllib.request.Request(
            f"http://{address}/predictions/{model}", batch, {"Content-Type": "application/octet-stream"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content

    return ask


def predict(ask: Ask, split: Split) -> Any:
    """The probabilities of `split`, float32 [rows, 1]; a request of at most 128 rows at a time."""
    answers = []
    for batch in split.batches():
        answer = json.loads(ask(to_persia_batch(batch, requires_grad=False).to_bytes()))
        (output,) = answer["outputs"]
        answers.append(np.array(output["data"], np.float32).reshape(output["shape"]))
    return np.concatenate(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Test AUC through TorchServe.")
    parser.add_argument("--api", choices=sorted(DEFAULT_ADDRESSES), default="grpc")
    parser.add_argument("--address", help="host:port; default: 127.0.0.1 with the API's usual port")
    parser.add_argument("--model", default="adult", help="its name in TorchServe")
    parser.add_argument("--data", type=Path, default=DEFAULT_DIRECTORY, help="directory of the prepared data")
    arguments = parser.parse_args()
    split = load_split(arguments.data, "test")
    over = over_grpc if arguments.api == "grpc" else over_rest
    ask = over(arguments.address or DEFAULT_ADDRESSES[arguments.api], arguments.model)
    auc = roc_auc(split.labels, predict(ask, split))
    print(f"test AUC {auc:.7f} of {len(split):,} rows")


if __name__ == "__main__":
    main()
