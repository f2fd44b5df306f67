"""Accuracy and latency of a served model, as a client of the Open Inference Protocol sees them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from persia.data.striped import Batches
from persia.embedding.checks import at_least
from persia.errors import InvalidArgumentError, UnavailableError
from persia.nn.metrics import ClickQuality, quality_of
from persia.serving.protocol import SERVICE, message
from persia.serving.tensors import INPUT_NAME, tensor_of_bytes

__all__ = ["Latency", "PredictionClient", "accuracy", "latency"]


class PredictionClient:
    """Asks one model of a server over gRPC, without encryption. For several threads; use it in a `with`.

    Args:
        address: HOST:PORT of `persia-launcher serve`.
        model: its `--model-name`.
        version: of the model, or its label; empty: the server chooses.
        timeout_s: of a request.
        wait_s: for a server that is starting.

    Raises UnavailableError if no server answers within `wait_s`.
    """

    def __init__(
        self,
        address: str,
        model: str = "model",
        *,
        version: str = "",
        timeout_s: float = 60.0,
        wait_s: float = 10.0,
    ) -> None:
        self._address, self._model, self._version, self._timeout_s = address, model, version, timeout_s
        # gRPC refuses replies above 4 MiB by default, which a batch of wide outputs exceeds.
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._infer: Any = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")
        try:
            grpc.channel_ready_future(self._channel).result(wait_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise UnavailableError(
                f"no server answers at {address} within {wait_s:g} s: start persia-launcher serve, or "
                "correct the address"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def request(self, batch: bytes) -> bytes:
        """The encoded request for the bytes of a `PersiaBatch`."""
        asked = message("ModelInferRequest")(model_name=self._model, model_version=self._version)
        tensor = asked.inputs.add(name=INPUT_NAME, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(batch)
        return bytes(asked.SerializeToString())

    def ask(self, request: bytes) -> bytes:
        """The encoded reply. Raises UnavailableError with the server's status and message."""
        try:
            return bytes(self._infer(request, timeout=self._timeout_s))
        except grpc.RpcError as error:
            status: Any = error
            raise UnavailableError(
                f"the server at {self._address} did not predict: {status.code().name}: {status.details()}"
            ) from None

    def predict(self, batch: bytes) -> NDArray[np.float32]:
        """The first output, float32 [samples], for the bytes of a `PersiaBatch`.

        Raises UnavailableError, as `ask`, and InvalidArgumentError for a reply without raw bytes of a tensor.
        """
        reply = message("ModelInferResponse").FromString(self.ask(self.request(batch)))
        if not reply.outputs or not reply.raw_output_contents:
            raise InvalidArgumentError(
                f"the reply of {self._address} has {len(reply.outputs)} outputs and "
                f"{len(reply.raw_output_contents)} raw contents: ask a model that returns a tensor, of a "
                "server that answers with raw_output_contents, as persia-launcher serve does"
            )
        output, content = reply.outputs[0], reply.raw_output_contents[0]
        values = tensor_of_bytes(output.name, output.datatype, list(output.shape), content)
        return values.array(output.datatype).astype(np.float32).reshape(-1)


def accuracy(
    client: PredictionClient, batches: Batches, *, max_steps: int | None = None, from_logits: bool = True
) -> ClickQuality:
    """The quality of served predictions of labels 0 and 1.

    Args:
        client: of the server.
        batches: with one label; at most as long as the server's `--max-batch-size`.
        max_steps: batches to ask for; None: all.
        from_logits: whether the model returns logits, as those of `persia.models`.

    Raises:
        UnavailableError: the server failed or refused a request.
        InvalidArgumentError: no batches, or the model returns another number of values than samples.
    """
    outputs, targets = [], []
    for rows in itertools.islice(batches.read(), max_steps):
        batch = batches.make(rows, requires_grad=False)
        outputs.append(torch.from_numpy(client.predict(batch.to_bytes())))
        targets.append(torch.from_numpy(batch.labels[0].data.reshape(-1)))
        if len(outputs[-1]) != len(targets[-1]):
            raise InvalidArgumentError(
                f"output_0 has {len(outputs[-1])} values for {len(targets[-1])} samples: serve a model that "
                "returns one value a sample"
            )
    if not outputs:
        raise InvalidArgumentError("there are no batches to evaluate on: pass at least one")
    return quality_of(outputs, targets, from_logits=from_logits)


@dataclass(frozen=True)
class Latency:
    """Times of requests of one batch size."""

    num_requests: int
    samples_per_s: float
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float


def latency(
    client: PredictionClient, batches: Sequence[bytes], num_samples: float, *, concurrency: int = 1
) -> Latency:
    """Sends each batch once, `concurrency` at a time, each when an earlier one is answered.

    Args:
        client: of the server.
        batches: bytes of `PersiaBatch`es. Before, the first is sent `concurrency` times and not measured.
        num_samples: of a batch, on average.
        concurrency: threads that send.

    Raises UnavailableError if a request fails.
    """
    requests = [client.request(batch) for batch in batches]

    def timed(request: bytes) -> float:
        begin = time.perf_counter()
        client.ask(request)
        return (time.perf_counter() - begin) * 1e3

    with ThreadPoolExecutor(at_least(1, "concurrency", concurrency)) as threads:
        # Not measured: the first requests of a server allocate its memory, and each thread opens its stream.
        list(threads.map(timed, requests[:1] * concurrency))
        begin = time.perf_counter()
        times = list(threads.map(timed, requests))
        seconds = time.perf_counter() - begin
    quantiles = np.percentile(times, [50, 90, 95, 99])
    return Latency(
        len(times), len(times) * num_samples / seconds, float(np.mean(times)), *map(float, quantiles)
    )
