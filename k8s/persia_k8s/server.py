"""The REST service, with the published endpoints.

As published, GET requests may carry their arguments as a JSON body; as usual, in the query. Unlike the
published one it asks every caller for a token, and answers errors with an HTTP status of their own.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from persia_k8s.access import (
    Handler,
    Limits,
    authentication,
    failure,
    limited,
    read_token,
    reloading,
    tls_context,
)
from persia_k8s.cluster import Cluster, ClusterError
from persia_k8s.errors import PersiaK8sError
from persia_k8s.names import GROUP, JOB_LABEL, KIND, VERSION
from persia_k8s.openapi import openapi_document

_FIELD_MANAGER = "persia-server"
_MAX_BODY_BYTES = 1 << 20  # a PersiaJob larger than this does not fit into etcd
_LIMITS = Limits()


def run_server(
    host: str,
    port: int,
    token_file: Path,
    *,
    read_token_file: Path | None = None,
    tls_folder: Path | None = None,
    limits: Limits = _LIMITS,
) -> None:
    """Serves until SIGTERM or SIGINT."""
    token = read_token(token_file)
    reader = None if read_token_file is None else read_token(read_token_file, "--read-token-file")
    if reader == token:
        raise PersiaK8sError(
            f"--read-token-file {read_token_file} holds the token of --token-file, which may also change "
            "jobs: generate another token for readers"
        )
    context = None if tls_folder is None else tls_context(tls_folder)
    app = make_app(Cluster(), token, reader, limits)
    if context is not None and tls_folder is not None:
        app.cleanup_ctx.append(reloading(context, tls_folder))
    web.run_app(app, host=host, port=port, ssl_context=context, print=functools.partial(print, flush=True))


def make_app(
    cluster: Cluster, token: str, reader: str | None = None, limits: Limits = _LIMITS
) -> web.Application:
    """The service over `cluster`, for callers that know `token`; those that know `reader` may only read."""
    # Limits come first: a wrong token is also a request.
    app = web.Application(
        middlewares=[limited(limits), _errors, authentication(token, reader)], client_max_size=_MAX_BODY_BYTES
    )
    endpoints = _Endpoints(cluster)
    app.add_routes(
        [
            web.post("/apply", endpoints.apply),
            web.post("/delete", endpoints.delete),
            web.get("/listjobs", endpoints.list_jobs),
            web.get("/listpods", endpoints.list_pods),
            web.get("/podstatus", endpoints.pod_status),
            web.get("/podlog", endpoints.pod_log),
            web.get("/openapi.json", endpoints.openapi),
            web.get("/healthz", endpoints.healthz),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _BadRequestError as error:
        return failure(400, str(error))
    except ClusterError as error:
        # These statuses are about the caller's object, and the caller can correct it.
        status = error.status if error.status in (400, 404, 409, 422) else 502
        return failure(400 if status == 422 else status, str(error))
    except web.HTTPException as error:
        return failure(error.status, error.reason)


class _BadRequestError(PersiaK8sError):
    """A request that cannot be used."""


def _success(**more: Any) -> web.Response:
    return web.json_response({"execution_results": {"success": True, "err_msg": None}, **more})


class _Endpoints:
    """One method for each path. The cluster's client blocks, so it is called on threads."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._openapi = openapi_document()

    async def apply(self, request: web.Request) -> web.Response:
        body = await _arguments(request)
        identifier = body.get("job_identifier")
        if not isinstance(identifier, dict) or not isinstance(body.get("spec"), dict):
            raise _BadRequestError("the body must be {job_identifier: {job_name, namespace}, spec: {...}}")
        manifest = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            # Only these: labels or owners from a caller could make the operator take objects of another job
            # for its own.
            "metadata": {"name": _text(identifier, "job_name"), "namespace": _namespace(identifier)},
            "spec": body["spec"],
        }
        await asyncio.to_thread(self._cluster.apply_job, manifest, _FIELD_MANAGER)
        return web.json_response({"success": True, "err_msg": None})

    async def delete(self, request: web.Request) -> web.Response:
        arguments = await _arguments(request)
        name = _text(arguments, "job_name")
        await asyncio.to_thread(self._cluster.delete_job, _namespace(arguments), name)
        return web.json_response({"success": True, "err_msg": None})

    async def list_jobs(self, request: web.Request) -> web.Response:
        arguments = await _arguments(request)
        jobs = await asyncio.to_thread(self._cluster.jobs, _namespace(arguments))
        return _success(resources=[_summary(job) for job in jobs])

    async def list_pods(self, request: web.Request) -> web.Response:
        arguments = await _arguments(request)
        job = _text(arguments, "job_name") if "job_name" in arguments else None
        pods = await asyncio.to_thread(self._cluster.pods, _namespace(arguments), job)
        return _success(
            resources=[{**_summary(pod), "job_name": pod["metadata"]["labels"][JOB_LABEL]} for pod in pods]
        )

    async def pod_status(self, request: web.Request) -> web.Response:
        arguments = await _arguments(request)
        name = _text(arguments, "pod_name")
        pod = await asyncio.to_thread(self._cluster.pod, _namespace(arguments), name)
        return _success(body=pod.get("status", {}))

    async def pod_log(self, request: web.Request) -> web.Response:
        arguments = await _arguments(request)
        namespace, name = _namespace(arguments), _text(arguments, "pod_name")
        lines = _number(arguments, "tail_lines", default=1000, maximum=100_000)
        await asyncio.to_thread(self._cluster.pod, namespace, name)  # pods of jobs only
        log = await asyncio.to_thread(self._cluster.pod_log, namespace, name, lines)
        return _success(body=log)

    async def openapi(self, _request: web.Request) -> web.Response:
        return web.json_response(self._openapi)

    async def healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")


async def _arguments(request: web.Request) -> dict[str, Any]:
    """The query's, and those of a JSON body."""
    # The published clients send a body with GET, others a query: the body wins where both name a value.
    arguments: dict[str, Any] = dict(request.query)
    if not request.can_read_body:
        return arguments
    try:
        body = json.loads(await request.text())
    except ValueError as error:
        raise _BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _BadRequestError("the body must be a JSON object")
    return {**arguments, **body}


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    # Part of a path of the API server.
    if not isinstance(value, str) or not value.replace("-", "").replace(".", "").isalnum():
        raise _BadRequestError(f"{name} is {value!r}: it must be the name of an object")
    return value


def _namespace(arguments: Mapping[str, Any]) -> str:
    return _text({"namespace": "default", **arguments}, "namespace")


def _number(arguments: Mapping[str, Any], name: str, *, default: int, maximum: int) -> int:
    value = str(arguments.get(name, default))
    # str.isdigit accepts digits of other scripts.
    if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= maximum:
        raise _BadRequestError(f"{name} is {value!r}: it must be a number from 1 to {maximum}")
    return int(value)


def _summary(item: Mapping[str, Any]) -> dict[str, Any]:
    metadata = item["metadata"]
    phase = (item.get("status") or {}).get("phase")
    return {"name": metadata["name"], "namespace": metadata["namespace"], "phase": phase}
