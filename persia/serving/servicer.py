"""The methods of the Open Inference Protocol over one served model."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from persia._version import __version__
from persia.errors import InvalidArgumentError, NotFoundError, PersiaError
from persia.logger import get_default_logger
from persia.serving.batcher import Batcher
from persia.serving.protocol import (
    INPUT_NAME,
    METHODS,
    SERVICE,
    batch_of,
    datatype_of,
    message,
    output_name,
    reply_of,
    status_of,
)
from persia.serving.statistics import ServingStatistics
from persia.serving.versions import ServedModel

_Method = Callable[[Any, Any], Awaitable[Any]]

_COUNTED = "ModelInfer"  # the others are asked for by probes


@dataclass(frozen=True)
class Servicer:
    """Every method answers with the protocol's message, or with a status and the message of the error."""

    model: ServedModel
    batcher: Batcher
    statistics: ServingStatistics
    timeout_s: float  # for requests that have no deadline of their own

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

    async def _server_live(self, _request: Any, _context: Any) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def _server_ready(self, _request: Any, _context: Any) -> Any:
        return message("ServerReadyResponse")(ready=await self._is_ready())

    async def _model_ready(self, request: Any, _context: Any) -> Any:
        self._check_model(request.name, request.version)
        return message("ModelReadyResponse")(ready=await self._is_ready())

    async def _server_metadata(self, _request: Any, _context: Any) -> Any:
        return message("ServerMetadataResponse")(name="persia", version=__version__)

    async def _model_metadata(self, request: Any, _context: Any) -> Any:
        self._check_model(request.name, request.version)
        reply = message("ModelMetadataResponse")(
            name=self.model.settings.name, versions=[self.model.version], platform="persia_torchscript"
        )
        reply.inputs.add(name=INPUT_NAME, datatype="BYTES", shape=[1])
        for position, (dtype, shape) in enumerate(self.model.outputs):
            reply.outputs.add(name=output_name(position), datatype=datatype_of(dtype), shape=[-1, *shape])
        return reply

    async def _model_infer(self, request: Any, context: Any) -> Any:
        self._check_model(request.model_name, request.model_version)
        # The earlier deadline counts: an answer after the client's own is of no use.
        left_s = context.time_remaining()
        future = self.batcher.submit(
            self.model.checked(batch_of(request)),
            self.timeout_s if left_s is None else min(left_s, self.timeout_s),
        )
        # Cancelled with this coroutine when the client goes away.
        prediction = await asyncio.wrap_future(future)
        return reply_of(request, self.model.settings.name, prediction.version, prediction.outputs)

    async def _is_ready(self) -> bool:
        return await asyncio.to_thread(self.model.not_ready) is None

    def _check_model(self, name: str, version: str) -> None:
        if name != self.model.settings.name:
            raise NotFoundError(f"there is no model {name!r}: this server has {self.model.settings.name!r}")
        # One version is loaded at a time; answering for another one would hide that it was replaced.
        if version not in ("", self.model.version):
            raise NotFoundError(
                f"model {name!r} has no version {version!r} here, but {self.model.version!r}: leave the "
                "version out for the one that is served"
            )

    def _with_status(self, name: str, request_class: Any, method: _Method) -> _Method:
        async def answer(content: bytes, context: Any) -> Any:
            # CANCELLED unless something below is reached: a client that leaves ends the coroutine by
            # CancelledError.
            begin_ns, code = time.monotonic_ns(), grpc.StatusCode.CANCELLED
            try:
                reply = await method(_parsed(request_class, content), context)
                code = grpc.StatusCode.OK
                return reply
            except PersiaError as failure:
                code = grpc.StatusCode[status_of(failure)[0]]
                await context.abort(code, str(failure))
            except Exception as failure:
                code = grpc.StatusCode.INTERNAL
                get_default_logger().exception("a request failed")
                await context.abort(code, f"{type(failure).__name__}: {failure}")
            finally:
                if name == _COUNTED:
                    self.statistics.add_request(begin_ns, code.name)

        return answer


def _parsed(request_class: Any, content: bytes) -> Any:
    try:
        return request_class.FromString(content)
    except DecodeError:
        raise InvalidArgumentError(
            f"the request's {len(content)} bytes are no {request_class.DESCRIPTOR.name} of the Open "
            "Inference Protocol"
        ) from None
