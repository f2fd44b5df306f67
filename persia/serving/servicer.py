"""The methods of the Open Inference Protocol over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict

from persia.errors import DeadlineExceededError
from persia.serving.grpc_port import Call, Handler
from persia.serving.models import Models
from persia.serving.protocol import METHODS, SERVICE, parsed, reply_of, status_of, tensors_of

_Method = Callable[[Any, Call], Any]  # answers with a message, or the dict of one, now or later

_COUNTED = "ModelInfer"  # the others are asked for by probes


@dataclass(frozen=True)
class Servicer:
    """Every method answers with the protocol's message, or with a status and the message of the error."""

    models: Models

    def handlers(self) -> dict[str, Handler]:
        """By the paths of their methods."""
        own = self.models
        methods: dict[str, _Method] = {
            "ServerLive": lambda _, __: {"live": True},
            "ServerReady": self._ready,
            "ModelReady": self._ready,
            "ServerMetadata": lambda _, __: own.server_metadata(),
            "ModelMetadata": lambda request, _: own.named(request.name).model_metadata(request.version),
            "ModelInfer": self._infer,
            "ModelStatistics": lambda request, _: own.model_statistics(request.name, request.version),
            "RepositoryIndex": lambda _, __: {"models": own.repository_index()},
        }
        return {
            f"/{SERVICE}/{name}": self._answering(name, request, reply, methods[name])
            for name, request, reply in METHODS
        }

    async def _ready(self, request: Any, _call: Call) -> dict[str, Any]:
        if not hasattr(request, "name"):
            return {"ready": await self.models.are_ready()}
        model = self.models.named(request.name)
        model.check_version(request.version)
        return {"ready": await model.is_ready()}

    async def _infer(self, request: Any, call: Call) -> Any:
        model = self.models.named(request.model_name)
        prediction = await model.infer(
            request.model_version, tensors_of(request), call.left_s, request.id or call.draw_id
        )
        return reply_of(request, model.name, prediction)

    def _answering(self, name: str, request_class: Any, reply_class: Any, method: _Method) -> Handler:
        async def answer(call: Call) -> None:
            code, model = "OK", ""
            try:
                content = await call.message()
                # Before it is parsed: behind a long queue nobody waits for the answer any more.
                if call.left_s <= 0:
                    raise DeadlineExceededError("the request's deadline passed before it was read")
                request = parsed(request_class, content)
                model = getattr(request, "model_name", "")
                found = method(request, call)
                found = await found if isinstance(found, Awaitable) else found
                reply = ParseDict(found, reply_class()) if isinstance(found, dict) else found
                call.send(reply.SerializeToString())
            except BaseException as failure:
                code = call.status or status_of(failure)[0]  # it may have been finished by its deadline
                raise
            finally:
                if name == _COUNTED:
                    self.models.statistics_of(model).add_request(call.begin_ns, code)

        return answer
