"""The methods of the Open Inference Protocol over gRPC."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from persia.errors import DeadlineExceededError, InvalidArgumentError
from persia.serving.inference import Inference
from persia.serving.protocol import METHODS, SERVICE, message_of, reply_of, status_of, tensors_of

_Method = Callable[[Any, float], Any]  # answers with a message, or the dict of one, now or later

_COUNTED = "ModelInfer"  # the others are asked for by probes


@dataclass(frozen=True)
class Servicer:
    """Every method answers with the protocol's message, or with a status and the message of the error."""

    inference: Inference

    def handlers(self) -> grpc.GenericRpcHandler:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        own = self.inference
        methods: dict[str, _Method] = {
            "ServerLive": lambda _, __: {"live": True},
            "ServerReady": self._ready,
            "ModelReady": self._ready,
            "ServerMetadata": lambda _, __: own.server_metadata(),
            "ModelMetadata": lambda request, _: own.model_metadata(request.name, request.version),
            "ModelInfer": self._infer,
            "ModelStatistics": lambda request, _: own.model_statistics(request.name, request.version),
            "RepositoryIndex": lambda _, __: {"models": own.repository_index()},
        }
        # Requests are parsed by us: what cannot be parsed is the client's fault, and grpc would say INTERNAL.
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(
                    self._with_status(name, request, reply, methods[name]),
                    response_serializer=reply.SerializeToString,
                )
                for name, request, reply in METHODS
            },
        )

    async def _ready(self, request: Any, _left_s: float) -> dict[str, Any]:
        if hasattr(request, "name"):
            self.inference.check_model(request.name, request.version)
        return {"ready": await self.inference.is_ready()}

    async def _infer(self, request: Any, left_s: float) -> Any:
        tensors = tensors_of(request)
        prediction = await self.inference.infer(
            request.model_name, request.model_version, tensors, left_s, request.id
        )
        return reply_of(request, self.inference.model.settings.name, prediction)

    def _with_status(
        self, name: str, request_class: Any, reply_class: Any, method: _Method
    ) -> Callable[[bytes, Any], Awaitable[Any]]:
        async def answer(content: bytes, context: Any) -> Any:
            begin_ns, code = time.monotonic_ns(), "OK"
            try:
                left_s = context.time_remaining()
                left_s = math.inf if left_s is None else left_s
                # Before it is parsed: behind a long queue nobody waits for the answer any more.
                if left_s <= 0:
                    raise DeadlineExceededError("the request's deadline passed before it was read")
                found = method(_parsed(request_class, content), left_s)
                found = await found if isinstance(found, Awaitable) else found
                return ParseDict(found, reply_class()) if isinstance(found, dict) else found
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
