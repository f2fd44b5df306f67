"""The methods of the Open Inference Protocol over gRPC."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from persia.errors import DeadlineExceededError, InvalidArgumentError
from persia.serving.inference import Inference
from persia.serving.protocol import METHODS, SERVICE, message, message_of, reply_of, status_of, tensors_of

_Method = Callable[[Any, float | None], Awaitable[Any]]

_COUNTED = "ModelInfer"  # the others are asked for by probes


@dataclass(frozen=True)
class Servicer:
    """Every method answers with the protocol's message, or with a status and the message of the error."""

    inference: Inference

    def handlers(self) -> grpc.GenericRpcHandler:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        # Requests are parsed by us: what cannot be parsed is the client's fault, and grpc would say INTERNAL.
        methods: dict[str, Any] = {}
        for name, request, reply in METHODS:
            method = getattr(self, "_" + re.sub("(?<!^)(?=[A-Z])", "_", name).lower())  # _model_infer
            methods[name] = grpc.unary_unary_rpc_method_handler(
                self._with_status(name, request, method), response_serializer=reply.SerializeToString
            )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _server_live(self, _request: Any, _left_s: float | None) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def _server_ready(self, _request: Any, _left_s: float | None) -> Any:
        return message("ServerReadyResponse")(ready=await self.inference.is_ready())

    async def _model_ready(self, request: Any, _left_s: float | None) -> Any:
        self.inference.check_model(request.name, request.version)
        return message("ModelReadyResponse")(ready=await self.inference.is_ready())

    async def _server_metadata(self, _request: Any, _left_s: float | None) -> Any:
        return ParseDict(self.inference.server_metadata(), message("ServerMetadataResponse")())

    async def _model_metadata(self, request: Any, _left_s: float | None) -> Any:
        values = self.inference.model_metadata(request.name, request.version)
        return ParseDict(values, message("ModelMetadataResponse")())

    async def _model_statistics(self, request: Any, _left_s: float | None) -> Any:
        values = self.inference.model_statistics(request.name, request.version)
        return ParseDict(values, message("ModelStatisticsResponse")())

    async def _repository_index(self, _request: Any, _left_s: float | None) -> Any:
        return ParseDict({"models": self.inference.repository_index()}, message("RepositoryIndexResponse")())

    async def _model_infer(self, request: Any, left_s: float | None) -> Any:
        prediction = await self.inference.infer(
            request.model_name,
            request.model_version,
            tensors_of(request),
            math.inf if left_s is None else left_s,
            request.id,
        )
        name = self.inference.model.settings.name
        return reply_of(request, name, prediction)

    def _with_status(
        self, name: str, request_class: Any, method: _Method
    ) -> Callable[[bytes, Any], Awaitable[Any]]:
        async def answer(content: bytes, context: Any) -> Any:
            begin_ns, code = time.monotonic_ns(), "OK"
            try:
                left_s = context.time_remaining()
                # Before it is parsed: behind a long queue nobody waits for the answer any more.
                if left_s is not None and left_s <= 0:
                    raise DeadlineExceededError("the request's deadline passed before it was read")
                return await method(_parsed(request_class, content), left_s)
            except BaseException as failure:
                code = status_of(failure)[0]
                if not isinstance(failure, Exception):  # the client has left
                    raise
                await context.abort(grpc.StatusCode[code], message_of(failure))
            finally:
                if name == _COUNTED:
                    self.inference.statistics.add_request(begin_ns, code)

        return answer


def _parsed(request_class: Any, content: bytes) -> Any:
    try:
        return request_class.FromString(content)
    except DecodeError:
        raise InvalidArgumentError(
            f"the request's {len(content)} bytes are no {request_class.DESCRIPTOR.name} of the Open "
            "Inference Protocol"
        ) from None
