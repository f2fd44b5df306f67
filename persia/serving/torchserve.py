"""The handler that TorchServe runs: one instance in each of its worker processes.

A request is the bytes of `PersiaBatch.to_bytes()`, or a request of the Open Inference Protocol in JSON, whose
inputs are named like features: the whole body over REST, the input "batch" over gRPC (or "data" or "body",
TorchServe's own names). The answer is a response of the Open Inference Protocol as JSON,
the same over both. Requests that TorchServe hands over together are computed together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from persia.checkpoint.checkpoints import Source
from persia.config import load_embedding_config
from persia.embedding.data import PersiaBatch
from persia.errors import FailedPreconditionError, InvalidArgumentError, PersiaError
from persia.logger import get_default_logger
from persia.serving.archive import SLOTS_NAME, ArchiveSettings
from persia.serving.batch_predict import Prediction, layout_of, predict_together
from persia.serving.embeddings import EmbeddedRows, EmbeddingSource, RemoteRows
from persia.serving.json_request import tensors_of_json
from persia.serving.predictor import Predictor
from persia.serving.protocol import status_of
from persia.serving.scripts import load_script
from persia.serving.tensors import INPUT_NAME, batch_of, decoded_batch, described, json_values, output_name
from persia.storage.manifest import Manifest
from persia.validation import json_object

_INPUT_NAMES = (INPUT_NAME, "data", "body")


class Handler:
    """TorchServe makes one, calls `initialize` once, and then `handle`, one call at a time."""

    def initialize(self, context: Any) -> None:
        """Loads the version that the archive names. What it raises is in TorchServe's model log."""
        properties, model = context.system_properties, context.manifest["model"]
        settings = ArchiveSettings.of(context.model_yaml_config)
        source = Source(settings.checkpoint)
        # The archive has no rows or weights of its own: a checkpoint written over it would be another
        # version.
        if Manifest.read(source.location)[1] != settings.manifest:
            raise FailedPreconditionError(
                f"{source.location} is no longer what was archived: archive it again, as a version of its own"
            )
        embeddings: EmbeddingSource
        if settings.embedding_workers:
            embeddings = RemoteRows(settings.embedding_workers, deadline_s=settings.timeout_s)
        else:
            slots = load_embedding_config(str(Path(properties["model_dir"]) / SLOTS_NAME))
            embeddings = EmbeddedRows(source, slots)
        gpu = properties.get("gpu_id")
        uses_gpu = gpu is not None and torch.cuda.is_available()
        device = torch.device("cuda", int(gpu)) if uses_gpu else None
        self._name, self._version = model["modelName"], model["modelVersion"]
        self._predictor = Predictor(
            load_script(source), embeddings, device=device, signature=source.signature
        )
        get_default_logger().info(
            "%s: version %s, loaded from %s", self._name, self._version, source.location
        )

    def handle(self, data: Sequence[Mapping[str, Any]], context: Any) -> list[str]:
        """An answer to each request. A refused one has its status; are all refused, it is the call's."""
        answers = self._answers([self._parsed(request) for request in data])
        # An exception is the answer to all requests of the call, so it is raised only if all are refused.
        refused = [answer for answer in answers if isinstance(answer, PersiaError)]
        if len(refused) == len(answers):
            from ts.utils.util import PredictionException  # exists only where TorchServe runs this

            raise PredictionException(str(refused[0]), status_of(refused[0])[1])
        for index, answer in enumerate(answers):
            if isinstance(answer, PersiaError):
                context.set_response_status(
                    code=status_of(answer)[1], phrase=type(answer).__name__, idx=index
                )
        return [self._encoded(answer) for answer in answers]

    def _answers(self, batches: list[PersiaBatch | PersiaError]) -> list[Prediction | PersiaError]:
        answers: list[Any] = list(batches)
        good = [(i, batch) for i, batch in enumerate(batches) if isinstance(batch, PersiaBatch)]
        # Only neighbours are joined: sorting by layout would cost more than it saves, as clients send one
        # layout.
        for _, group in groupby(good, key=lambda item: layout_of(item[1])):
            indices, alike = zip(*group, strict=True)
            together = predict_together(
                lambda one: Prediction(self._version, self._predictor.predict(one)), alike
            )
            for index, answer in zip(indices, together, strict=True):
                answers[index] = answer
        return answers

    def _parsed(self, request: Mapping[str, Any]) -> PersiaBatch | PersiaError:
        content = next((request[name] for name in _INPUT_NAMES if name in request), None)
        # TorchServe parses a body of application/json itself.
        if not isinstance(content, (bytes, bytearray, dict)):
            return InvalidArgumentError(
                f"the request has the inputs {sorted(request)}: send one named {INPUT_NAME!r}, or the body, "
                "the bytes of PersiaBatch.to_bytes() (application/octet-stream), or an Open Inference "
                "request in JSON (application/json)"
            )
        try:
            return self._predictor.checked(self._batch(content))
        except PersiaError as failure:
            return failure

    def _batch(self, content: bytes | bytearray | dict[str, Any]) -> PersiaBatch:
        if isinstance(content, dict):
            return batch_of(tensors_of_json(content), self._predictor.signature)
        # A batch begins with its magic number, which is no space and no brace.
        if content[:64].lstrip()[:1] == b"{":
            return self._batch(json_object(bytes(content), "the request"))
        return decoded_batch(bytes(content))

    def _encoded(self, answer: Prediction | PersiaError) -> str:
        if isinstance(answer, PersiaError):
            return json.dumps({"code": status_of(answer)[1], "error": str(answer)})
        outputs = [
            {**described(output_name(position), output), "data": json_values(output)}
            for position, output in enumerate(answer.outputs)
        ]
        return json.dumps({"model_name": self._name, "model_version": answer.version, "outputs": outputs})
