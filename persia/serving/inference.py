"""What a server of predictions answers, whichever protocol asks: plain values, which both can encode."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from persia._version import __version__
from persia.errors import NotFoundError
from persia.serving.batch_predict import Prediction
from persia.serving.batcher import Batcher
from persia.serving.statistics import ServingStatistics
from persia.serving.tensors import INPUT_NAME, Tensor, batch_of, datatype_of, output_name
from persia.serving.versions import ServedModel

_EXTENSIONS = ["statistics", "model_repository", "binary_tensor_data"]


@dataclass(frozen=True)
class Inference:
    """The Open Inference Protocol over one served model, under the names of its messages."""

    model: ServedModel
    batcher: Batcher
    statistics: ServingStatistics
    timeout_s: float  # for requests that have no deadline of their own

    async def infer(
        self, name: str, version: str, tensors: Sequence[Tensor], left_s: float = math.inf
    ) -> Prediction:
        """The answer to a request whose client waits for `left_s`."""
        self.check_model(name, version)
        batch = self.model.checked(batch_of(tensors, self.model.signature))
        # The earlier deadline counts: an answer after the client's own is of no use.
        future = self.batcher.submit(batch, min(left_s, self.timeout_s))
        # Cancelled with this coroutine when the client goes away.
        return await asyncio.wrap_future(future)

    async def is_ready(self) -> bool:
        return await asyncio.to_thread(self.model.not_ready) is None

    def server_metadata(self) -> dict[str, Any]:
        return {"name": "persia", "version": __version__, "extensions": _EXTENSIONS}

    def model_metadata(self, name: str, version: str) -> dict[str, Any]:
        """The inputs that a request must have; an ID feature NAME may have NAME.lengths and NAME.weights."""
        self.check_model(name, version)
        signature = self.model.signature
        inputs: list[dict[str, Any]] = [{"name": INPUT_NAME, "datatype": "BYTES", "shape": [1]}]
        if signature is not None and not signature.repeated:
            inputs = [{"name": f.name, "datatype": "INT64", "shape": [-1, -1]} for f in signature.ids]
            inputs += [
                {"name": f.name, "datatype": datatype_of(f.dtype), "shape": [-1, *f.shape]}
                for f in signature.dense
            ]
        outputs = [
            {"name": output_name(position), "datatype": datatype_of(dtype), "shape": [-1, *shape]}
            for position, (dtype, shape) in enumerate(self.model.outputs)
        ]
        return {
            "name": self.model.settings.name,
            "versions": [self.model.version],
            "platform": "persia_torchscript",
            "inputs": inputs,
            "outputs": outputs,
        }

    def model_statistics(self, name: str, version: str) -> dict[str, Any]:
        """`name` "": of all models, of which there is one."""
        self.check_model(name or self.model.settings.name, version)
        own = {"name": self.model.settings.name, "version": self.model.version}
        return {"model_stats": [{**own, **self.statistics.of_protocol()}]}

    def repository_index(self) -> list[dict[str, Any]]:
        own = {"name": self.model.settings.name, "version": self.model.version}
        return [{**own, "state": "READY", "reason": self.model.error}]

    def check_model(self, name: str, version: str) -> None:
        """NotFoundError: this server has another model or version."""
        if name != self.model.settings.name:
            raise NotFoundError(f"there is no model {name!r}: this server has {self.model.settings.name!r}")
        # One version is loaded at a time; answering for another one would hide that it was replaced.
        if version not in ("", self.model.version):
            raise NotFoundError(
                f"model {name!r} has no version {version!r} here, but {self.model.version!r}: leave the "
                "version out for the one that is served"
            )
