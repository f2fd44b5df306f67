"""What a server of predictions answers, whichever protocol asks: plain values, which both can encode."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from persia.embedding.data import PersiaBatch
from persia.errors import DeadlineExceededError, NotFoundError
from persia.serving.batch_predict import Prediction
from persia.serving.batcher import Batcher
from persia.serving.canary import CANARY, STABLE, Canary
from persia.serving.protocol import status_of
from persia.serving.request_log import RequestLog
from persia.serving.statistics import ServingStatistics
from persia.serving.tensors import INPUT_NAME, Tensor, batch_of, datatype_of, output_name
from persia.serving.versions import ServedModel


class _Arrivals:
    """Answers on their way from the threads that compute to one event loop, which is woken once for many.

    `asyncio.wrap_future` wakes the loop for each: a batch has the answers to dozens of requests.
    """

    def __init__(self) -> None:
        self._arrived: deque[tuple[asyncio.Future[Prediction], Future[Prediction]]] = deque()
        self._is_scheduled = False

    async def of(self, future: Future[Prediction], left_s: float) -> Prediction:
        """The result of `future`, or its error. Cancelled with this coroutine when the client goes away.

        DeadlineExceededError: there is none after `left_s`.
        """
        loop = asyncio.get_running_loop()
        awaited: asyncio.Future[Prediction] = loop.create_future()
        future.add_done_callback(lambda done: self._arrive(loop, awaited, done))
        timer = loop.call_later(left_s, _expire, awaited)
        try:
            return await awaited
        finally:
            timer.cancel()
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


def _expire(awaited: asyncio.Future[Prediction]) -> None:
    if not awaited.done():
        message = "the request's deadline passed before its answer: the server is behind"
        awaited.set_exception(DeadlineExceededError(message))


@dataclass(frozen=True)
class Inference:
    """One served model with its queue, as the Open Inference Protocol asks for it."""

    model: ServedModel
    batcher: Batcher
    statistics: ServingStatistics
    timeout_s: float  # for requests that have no deadline of their own
    canary: Canary | None = None
    request_log: RequestLog | None = None
    _arrivals: _Arrivals = field(default_factory=_Arrivals, init=False, repr=False)

    @property
    def name(self) -> str:
        """What requests call the model."""
        return self.model.settings.name

    async def infer(
        self,
        version: str,
        tensors: Sequence[Tensor],
        left_s: float = math.inf,
        request_id: str = "",
    ) -> Prediction:
        """The answer to a request whose client waits for `left_s`."""
        model, canary = self.check_version(version), self.canary
        # The earlier deadline counts: an answer after the client's own is of no use.
        left_s = min(left_s, self.timeout_s)
        if canary is None:
            batch, answer = await self._ask(model, self.batcher, tensors, left_s)
        elif model is canary.model:
            batch, answer = await self._ask_canary(canary, tensors, left_s)
        elif version or not canary.takes(request_id):
            batch, answer = await self._ask(model, self.batcher, tensors, left_s)
            canary.shadow(batch, answer, request_id)
        else:
            batch, answer = await self._try_canary(canary, tensors, left_s)
        if self.request_log is not None:
            self.request_log.offer(batch, request_id)
        return answer

    async def _ask(
        self, model: ServedModel, batcher: Batcher, tensors: Sequence[Tensor], left_s: float
    ) -> tuple[PersiaBatch, Prediction]:
        batch = model.checked(batch_of(tensors, model.signature))
        return batch, await self._arrivals.of(batcher.submit(batch, left_s), left_s)

    async def _ask_canary(
        self, canary: Canary, tensors: Sequence[Tensor], left_s: float
    ) -> tuple[PersiaBatch, Prediction]:
        assert canary.model is not None, "requests find it by its version"
        begin_ns, code = time.monotonic_ns(), "OK"
        try:
            return await self._ask(canary.model, canary.batcher, tensors, left_s)
        except BaseException as failure:
            code = status_of(failure)[0]
            raise
        finally:
            canary.statistics.add_request(begin_ns, code)

    async def _try_canary(
        self, canary: Canary, tensors: Sequence[Tensor], left_s: float
    ) -> tuple[PersiaBatch, Prediction]:
        """What the canary answers within half of the time, or else the stable version."""
        begin_s, version = time.monotonic(), canary.current
        try:
            answer = await self._ask_canary(canary, tensors, left_s / 2)
        except Exception as failure:
            left_s -= time.monotonic() - begin_s
            answer = await self._ask(self.model, self.batcher, tensors, left_s)
            canary.judge(version, failure)  # after the answer: what both fail is the request's fault
        else:
            canary.judge(version)
        return answer

    async def is_ready(self) -> bool:
        return await asyncio.to_thread(self.model.not_ready) is None

    def model_metadata(self, version: str) -> dict[str, Any]:
        """The inputs that a request must have; an ID feature NAME may have NAME.lengths and NAME.weights."""
        model = self.check_version(version)
        signature = model.signature
        inputs: list[dict[str, Any]] = [{"name": INPUT_NAME, "datatype": "BYTES", "shape": [1]}]
        if signature is not None and not signature.repeated:
            inputs = [{"name": f.name, "datatype": "INT64", "shape": [-1, -1]} for f in signature.ids]
            inputs += [
                {"name": f.name, "datatype": datatype_of(f.dtype), "shape": [-1, *f.shape]}
                for f in signature.dense
            ]
        outputs = [
            {"name": output_name(position), "datatype": datatype_of(dtype), "shape": [-1, *shape]}
            for position, (dtype, shape) in enumerate(model.outputs)
        ]
        return {
            "name": self.name,
            "versions": [index["version"] for index in self.repository_index()],
            "platform": "persia_torchscript",
            "inputs": inputs,
            "outputs": outputs,
        }

    def model_statistics(self, version: str) -> dict[str, Any]:
        """An entry of the message ModelStatistics."""
        model = self.check_version(version)
        canary = self.canary
        statistics = self.statistics if canary is None or model is not canary.model else canary.statistics
        return {"name": self.name, "version": model.version, **statistics.of_protocol()}

    def repository_index(self) -> list[dict[str, Any]]:
        own = {"name": self.name, "version": self.model.version}
        index: list[dict[str, Any]] = [{**own, "state": "READY", "reason": self.model.error}]
        if self.canary is not None and self.canary.model is not None:
            index.append({**index[0], "version": self.canary.version, "reason": self.canary.error})
        return index

    def check_version(self, version: str) -> ServedModel:
        """The model of a version. NotFoundError: this server has another version."""
        # Answering for a version that is not loaded would hide that it was replaced.
        if version in ("", STABLE, self.model.version):
            return self.model
        canary = None if self.canary is None else self.canary.model
        if canary is not None and version in (CANARY, canary.version):
            return canary
        others = "" if canary is None else f" and, as canary, {canary.version!r}"
        raise NotFoundError(
            f"model {self.name!r} has no version {version!r} here, but {self.model.version!r}{others}: leave "
            "the version out for the one that is served"
        )
