"""The Open Inference Protocol over HTTP: JSON, with tensors in it or, by an extension, as bytes behind it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from persia.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    StorageError,
)
from persia.serving.access import EVERYBODY, Access, token_middleware
from persia.serving.batch_predict import Prediction
from persia.serving.json_request import objects_of, parameters_of, tensors_of_json
from persia.serving.models import Models
from persia.serving.protocol import message_of, named_outputs, status_of
from persia.serving.tensors import Tensor, described, json_values
from persia.validation import json_object

_HEADER = "Inference-Header-Content-Length"  # bytes of JSON, where tensors follow as bytes
_DRAIN_S = 5.0

_Handler = Callable[[web.Request], Awaitable[Any]]


@dataclass(frozen=True)
class HttpEndpoint:
    """The models of a server behind a port of HTTP."""

    models: Models
    permits: asyncio.Semaphore  # of requests that are read, computed or answered
    timeout_s: float  # of a request
    access: Access = EVERYBODY

    async def listen(self, host: str, port: int, max_request_bytes: int) -> tuple[web.AppRunner, int]:
        """Serves until the runner is cleaned up; the port. StorageError: the address cannot be used."""
        runner = web.AppRunner(
            self._application(max_request_bytes),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_DRAIN_S,
            handler_cancellation=True,  # a client that leaves gives its request up
        )
        await runner.setup()
        tls = self.access.tls
        context = None if tls is None else tls.server_context()
        try:
            await web.TCPSite(runner, host, port, ssl_context=context).start()
        except OSError as failure:
            await runner.cleanup()
            raise StorageError(f"cannot listen on {host}:{port} (--host, --http-port): {failure}") from None
        return runner, runner.addresses[0][1]

    def _application(self, max_request_bytes: int) -> web.Application:
        check = token_middleware(self.access, self.models.statistics)
        # aiohttp refuses larger bodies while it reads them, so that memory stays bounded by the permits.
        application = web.Application(client_max_size=max_request_bytes, middlewares=[check])
        own, ready = self.models, self._ready
        routes: list[tuple[str, str, Callable[[web.Request], Any]]] = [
            ("GET", "/v2", lambda _: own.server_metadata()),
            ("GET", "/v2/health/live", lambda _: {"live": True}),
            ("GET", "/v2/health/ready", ready),
            ("POST", "/v2/repository/index", lambda _: own.repository_index()),
            ("GET", "/v2/models/stats", lambda _: own.model_statistics("", "")),
        ]
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version:.+}"):
            routes += [
                ("POST", f"{prefix}/infer", self._infer),
                ("GET", f"{prefix}/ready", ready),
                ("GET", f"{prefix}/stats", lambda request: own.model_statistics(*_model(request))),
                ("GET", prefix, lambda request: self._metadata(*_model(request))),
            ]
        for method, path, handler in routes:
            application.router.add_route(method, path, _answering(handler))
        return application

    async def _ready(self, request: web.Request) -> dict[str, Any]:
        if "model" in request.match_info:
            name, version = _model(request)
            model = self.models.named(name)
            model.check_version(version)
            is_ready = await model.is_ready()
        else:
            is_ready = await self.models.are_ready()
        if not is_ready:
            raise web.HTTPServiceUnavailable(text='{"ready": false}', content_type="application/json")
        return {"ready": True}

    def _metadata(self, name: str, version: str) -> dict[str, Any]:
        return self.models.named(name).model_metadata(version)

    async def _infer(self, request: web.Request) -> web.Response:
        begin_ns, code = time.monotonic_ns(), "OK"
        try:
            # Before the body is read: bodies of refused requests take no memory.
            if self.permits.locked():
                raise ResourceExhaustedError(
                    "as many requests as this server holds are under way (--max-queued): try again later, "
                    "or ask another server"
                )
            async with self.permits:
                return await self._predict(request)
        except web.HTTPRequestEntityTooLarge:
            code = "RESOURCE_EXHAUSTED"
            raise
        except BaseException as failure:
            code = status_of(failure)[0]
            raise
        finally:
            self.models.statistics_of(_model(request)[0]).add_request(begin_ns, code)

    async def _predict(self, request: web.Request) -> web.Response:
        timeout_s, (name, version) = self.timeout_s, _model(request)
        try:
            body = await asyncio.wait_for(request.read(), timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceededError(f"the body has not arrived in {timeout_s:g} s (--timeout)") from None
        head, tensors = _parsed(body, request.headers.get(_HEADER))
        model = self.models.named(name)
        prediction = await model.infer(version, tensors, request_id=_id_of(head) or "")
        return _encoded(head, name, prediction)


def _id_of(head: dict[str, Any]) -> str | None:
    value = head.get("id")
    return value if isinstance(value, str) else None


def _model(request: web.Request) -> tuple[str, str]:
    return request.match_info["model"], request.match_info.get("version", "")


def _answering(handler: Callable[[web.Request], Any]) -> _Handler:
    """Answers with what the handler returns, or with the status and message of its error."""

    async def answer(request: web.Request) -> web.Response:
        try:
            found = handler(request)
            found = await found if isinstance(found, Awaitable) else found
            return found if isinstance(found, web.Response) else web.json_response(found)
        except web.HTTPRequestEntityTooLarge as failure:
            return web.json_response({"error": f"the request is too large: {failure.text}"}, status=413)
        except web.HTTPException:
            raise
        except Exception as failure:
            # TorchServe has 500 for it in the table of statuses.
            status = 404 if isinstance(failure, NotFoundError) else status_of(failure)[1]
            return web.json_response({"error": message_of(failure)}, status=status)

    return answer


def _parsed(body: bytes, header: str | None) -> tuple[dict[str, Any], list[Tensor]]:
    """The JSON of a request, and its inputs. InvalidArgumentError, CorruptionError: what is wrong with it."""
    if header is not None and not (re.fullmatch("[0-9]{1,18}", header) and int(header) <= len(body)):
        raise InvalidArgumentError(f"{_HEADER} is {header!r:.40}, and the body has {len(body)} bytes")
    end = len(body) if header is None else int(header)
    head = json_object(body[:end], "the request")
    return head, tensors_of_json(head, body[end:])


def _encoded(head: dict[str, Any], model: str, prediction: Prediction) -> web.Response:
    # Outputs in the order in which they were asked for; all of them, in the model's order, if none was.
    requested = objects_of(head, "outputs")
    wanted = [name for output in requested if isinstance(name := output.get("name"), str)]
    if len(wanted) < len(requested):
        raise InvalidArgumentError("an output of the request has no name: send text")
    all_binary = bool(parameters_of(head).get("binary_data_output"))
    is_binary = {o.get("name"): bool(parameters_of(o).get("binary_data", all_binary)) for o in requested}
    outputs, contents = [], []
    for name, output in named_outputs(prediction.outputs, wanted):
        values = described(name, output)
        if is_binary.get(name, all_binary):
            contents.append(output.tobytes())
            values["parameters"] = {"binary_data_size": len(contents[-1])}
        else:
            values["data"] = json_values(output)
        outputs.append(values)
    answer: dict[str, Any] = {
        "model_name": model,
        "model_version": prediction.version,
        "outputs": outputs,
    }
    if prediction.parameters:
        answer["parameters"] = prediction.parameters
    if (request_id := _id_of(head)) is not None:
        answer["id"] = request_id
    if not contents:
        return web.json_response(answer)
    text = json.dumps(answer).encode()
    return web.Response(
        body=b"".join([text, *contents]),
        content_type="application/octet-stream",
        headers={_HEADER: str(len(text))},
    )
