"""The standard services beside the protocol's: health and server reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from persia.errors import NotFoundError
from persia.serving.grpc_port import Call, Handler
from persia.serving.protocol import POOL, SERVICE, parsed

WATCH = f"/{health.SERVICE_NAME}/Watch"
_REFLECT = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
ENDLESS = (WATCH, _REFLECT)
NOT_SERVING = health_pb2.HealthCheckResponse(
    status=health_pb2.HealthCheckResponse.NOT_SERVING
).SerializeToString()
_SERVICES = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)


def standard_handlers(states: health.aio.HealthServicer) -> dict[str, Handler]:
    """By the paths of their methods."""
    context_of: Any = _Context  # the part of gRPC's that is used
    # gRPC's own services behind the native front: messages and states are theirs, for the price of one
    # class.
    reflecting = reflection.aio.ReflectionServicer(_SERVICES, POOL)

    async def check(call: Call) -> None:
        request = parsed(health_pb2.HealthCheckRequest, await call.message())
        reply = await states.Check(request, context_of(call, request.service))
        call.send(reply.SerializeToString())

    async def watch(call: Call) -> None:
        request = parsed(health_pb2.HealthCheckRequest, await call.message())
        await states.Watch(request, context_of(call, request.service))

    async def reflect(call: Call) -> None:
        async def requests() -> AsyncIterator[Any]:
            async for message in call.messages():
                yield parsed(reflection_pb2.ServerReflectionRequest, message)

        # Clients ask with a stream and read each answer before the next question, so answers must not be
        # gathered.
        async for reply in reflecting.ServerReflectionInfo(requests(), None):
            call.send(reply.SerializeToString())

    return {
        f"/{health.SERVICE_NAME}/Check": check,
        WATCH: watch,
        _REFLECT: reflect,
    }


class _Context:
    """What the health service wants of gRPC's."""

    def __init__(self, call: Call, service: str) -> None:
        self._call, self._service = call, service

    async def abort(self, _code: Any) -> None:
        raise NotFoundError(f"there is no service {self._service!r:.200} here")

    async def write(self, message: Any) -> None:
        self._call.send(message.SerializeToString())
