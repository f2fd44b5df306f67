"""What a server of predictions answers, whichever protocol asks: plain values, which both can encode."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from persia._version import __version__
from persia.errors import NotFoundError
from persia.serving.batch_predict import Prediction
from persia.serving.batcher import Batcher
from persia.serving.statistics import ServingStatistics
from persia.serving.tensors import INPUT_NAME, Tensor, batch_of, datatype_of, output_name
from persia.serving.versions import ServedModel

_EXTENSIONS = ["statistics", "model_repository", "binary_tensor_data"]


class _Arrivals:
    """Answers on their way from the threads that compute to one event loop, which is woken once for many.

    `asyncio.wrap_future` wakes the loop for each: a batch has the answers to dozens of requests.
    """

    def __init__(self) -> None:
        self._arrived: deque[tuple[asyncio.Future[Prediction], Future[Prediction]]] = deque()
        self._is_scheduled = False

    async def of(self, future: Future[Prediction]) -> Prediction:
        """The result of `future`, or its error. Cancelled with this coroutine when the client goes away."""
        loop = asyncio.get_running_loop()
        awaited: asyncio.Future[Prediction] = loop.create_future()
        future.add_done_callback(lambda done: self._arrive(loop, awaited, done))
        try:
            return await awaited
        finally:
            future.cancel()  # without effect on one that is done

    def _arrive(
        self,
        loop: asyncio.AbstractEventLoop,
        awaited: asyncio.Future[Prediction],
        done: Future[Prediction],
    ) -> None:
        self._arrived.append((awaited, done))
        # Appended before it is read: `_deliver` that has not begun yet will find it.
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed, so no request waits
                self._is_scheduled = False

    def _deliver(self) -> None:
        self._is_scheduled = False
        while self._arrived:
            awaited, done = self._arrived.popleft()
            if awaited.done():
                continue  # cancelled: its client went away
            if (failure := done.exception()) is not None:
                awaited.set_exception(failure)
            else:
                awaited.set_result(done.result())


@dataclass(frozen=True)
class Inference:
    """The Open Inference Protocol over one served model, under the names of its messages."""

    model: ServedModel
    batcher: Batcher
    statistics: ServingStatistics
    timeout_s: float  # for requests that have no deadline of their own
    _arrivals: _Arrivals = field(default_factory=_Arrivals, init=False, repr=False)

    async def infer(
        self, name: str, version: str, tensors: Sequence[Tensor], left_s: float = math.inf
    ) -> Prediction:
        """The answer to a request whose client waits for `left_s`."""
        self.check_model(name, version)
        batch = self.model.checked(batch_of(tensors, self.model.signature))
        # The earlier deadline counts: an answer after the client's own is of no use.
        future = self.batcher.submit(batch, min(left_s, self.timeout_s))
        return await self._arrivals.of(future)

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
