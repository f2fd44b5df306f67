"""The gRPC server of models: the Open Inference Protocol and the standard health service on one port."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop
from aiohttp import web
from grpc_health.v1 import health, health_pb2

from persia import env
from persia._native import FrontModel, ServingFront, keep_freed_memory
from persia.embedding.dense_codec import DTYPES
from persia.errors import FailedPreconditionError, PersiaError, StorageError
from persia.job.connection import JobConnection
from persia.logger import get_default_logger, set_role
from persia.messaging.subjects import SERVING
from persia.observability.process import ObservabilitySettings, ProcessObserver
from persia.security.secret import INFERENCE
from persia.serving.access import Access
from persia.serving.batcher import Batcher, BatchingOptions
from persia.serving.canary import Canary, CanaryOptions
from persia.serving.grpc_port import GrpcPort, Limits
from persia.serving.health import ENDLESS, NOT_SERVING, WATCH, standard_handlers
from persia.serving.http import HttpEndpoint
from persia.serving.inference import Inference
from persia.serving.models import Models, ServingSource
from persia.serving.predictor import ModelSettings
from persia.serving.protocol import SERVICE
from persia.serving.request_log import RequestLog, RequestLogOptions
from persia.serving.servicer import Servicer
from persia.serving.statistics import ServingStatistics
from persia.serving.versions import ServedModel
from persia.storage.signature import DenseInput, IdInput

_DTYPE_NUMBERS = {dtype.name: number for number, dtype in enumerate(DTYPES)}
_HEALTH_INTERVAL_S = 1.0
_MAX_UNQUEUED = 256  # calls that are read, computed, answered or about health, beside those that are queued
_CONNECT_S = 5.0
_LEAVE_S = 2.0
_DRAIN_S = 5.0  # for requests under way when the server stops


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How models are served."""

    host: str = "127.0.0.1"
    port: int = 8001  # 0 takes a free one
    http_port: int | None = None  # 0: a free one; None: none
    timeout_s: float = 10.0  # of requests without a deadline
    max_request_bytes: int = 16 << 20
    metrics_port: int | None = 0  # of /metrics, /status and /readyz; 0: a free one; None: none
    nats_url: str | None = None  # of the job to show itself in; None: none
    replica_index: int = 0  # in that job
    replica_size: int = 1
    require_token: bool = False  # the token of persia.security.serve_token
    tls_cert: Path | None = None  # None: that of PERSIA_TLS_DIR, with its CA for clients
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # of the certificates of clients; None: they need none


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """One of the models."""

    settings: ModelSettings
    rows_of: str | None = None  # a model before this one, whose rows it reads; None: its own
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    canary: CanaryOptions | None = None
    request_log: RequestLogOptions | None = None


def serve(models: Sequence[ModelOptions], options: ServingOptions) -> None:
    """Serves until SIGTERM or SIGINT; requests under way are answered before it ends.

    Raises what is wrong with a first version; StorageError: the address cannot be listened on.
    """
    set_role(SERVING, options.replica_index)
    _check_ports(options)
    access = Access.of(options.require_token, options.tls_cert, options.tls_key, options.tls_client_ca)
    if access.is_open and not _is_loopback(options.host):
        get_default_logger().warning(
            "everybody who reaches %s gets predictions: --require-token or --tls-client-ca changes that",
            options.host,
        )
    with contextlib.ExitStack() as stack:
        if any(one.settings.embeddings is None for one in models):
            keep_freed_memory()  # of a replaced version, for the next one (ADR 59)
        begun: dict[str, Inference] = {}
        for one in models:
            begun[one.settings.name] = _begin(one, begun, options.timeout_s, stack)
        served = Models.of(list(begun.values()))
        source = ServingSource(served, options.replica_index, options.replica_size)
        # Health is on the port of the predictions already.
        shown = replace(
            ObservabilitySettings.from_environment(host=options.host),
            port=options.metrics_port,
            health_port=None,
        )
        # Without a session: a server that lost the broker of its job still answers, and must stay ready.
        observer = stack.enter_context(ProcessObserver(source, None, shown))
        max_requests = sum(one.batching.max_queued for one in models) + _MAX_UNQUEUED
        uvloop.run(_serve(served, observer, options, access, max_requests))


def _begin(
    options: ModelOptions, begun: Mapping[str, Inference], timeout_s: float, stack: contextlib.ExitStack
) -> Inference:
    """Loads a model, and begins to compute what is queued for it."""
    settings, batching, num_threads = options.settings, options.batching, options.batching.num_threads
    if settings.embeddings is not None:  # else a lookup that waits for a worker would hold a computation up
        batching = replace(batching, num_threads=2 * num_threads)
    if options.rows_of is not None:
        settings = replace(settings, embeddings=begun[options.rows_of].model)
    log = None if options.request_log is None else RequestLog(options.request_log)
    if log is not None:
        stack.callback(log.close)
    model = ServedModel(settings, num_threads=num_threads)
    stack.callback(model.close)
    statistics = ServingStatistics()
    # Registered after the model, so closed before it: what is queued is still answered.
    batcher = Batcher(statistics.measured(model.predict), batching, settings.name)
    stack.callback(batcher.close)
    canary = None
    if options.canary is not None:
        canary = Canary(settings, options.canary, batching, num_threads)
        stack.callback(canary.close)
    return Inference(model, batcher, statistics, timeout_s, canary, log)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_ports(options: ServingOptions) -> None:
    """Before a model is loaded, which may take minutes. Who takes a port meanwhile is found later."""
    for option, port in (
        ("--port", options.port),
        ("--http-port", options.http_port),
        ("--metrics-port", options.metrics_port),
    ):
        if port:
            try:
                address = socket.getaddrinfo(options.host, port, type=socket.SOCK_STREAM)[0]
                with socket.socket(*address[:3]) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                    probe.bind(address[4])
            except OSError as failure:
                raise StorageError(
                    f"cannot listen on {options.host}:{port} (--host, {option}): {failure}"
                ) from None


def _front(models: Models, options: ServingOptions, access: Access, max_requests: int) -> ServingFront:
    tls = access.tls
    return ServingFront(
        [_front_model(one) for one in models.by_name.values()],
        models.statistics.requests,
        options.timeout_s,
        options.max_request_bytes,
        max_requests,
        None if access.check is None else access.check.token_digest,
        None if tls is None else (str(tls.certificate), str(tls.key), str(tls.ca or "")),
    )


def _front_model(inference: Inference) -> FrontModel:
    canary, log = inference.canary, inference.request_log
    return FrontModel(
        inference.name,
        inference.batcher.queue,
        inference.statistics.requests,
        None if canary is None else canary.share.draw,
        None if canary is None else canary.shadow_share.draw,
        None if log is None else log.answered,
    )


def _use_inputs(front: ServingFront, inference: Inference) -> None:
    """Tells the front which requests are plain, so that it answers them without Python."""
    settings, signature = inference.model.settings, inference.model.signature
    limits = inference.model.current.predictor.id_limits
    ids: Sequence[IdInput] = () if signature is None else signature.ids
    dense: Sequence[DenseInput] = () if signature is None else signature.dense
    # Such a name could be a feature's own, or say how many IDs another has.
    names = [feature.name for feature in ids] + [feature.name for feature in dense]
    is_plain = not any(name.endswith((".lengths", ".weights")) for name in names)
    front.set_inputs(
        settings.name,
        None if signature is None else [(f.name, limits.get(f.name, 0)) for f in ids],
        [(f.name, _DTYPE_NUMBERS[f.dtype], f.shape) for f in dense],
        signature is not None and is_plain and not signature.repeated,
        settings.allow_nonfinite,
    )


async def _serve(
    models: Models, observer: ProcessObserver, options: ServingOptions, access: Access, max_requests: int
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Handlers of the loop, which run between callbacks: a Python handler could interrupt any of them.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    front = _front(models, options, access, max_requests)
    states = health.aio.HealthServicer()
    handlers = {**Servicer(models).handlers(), **standard_handlers(states)}
    limits = Limits(options.max_request_bytes, options.timeout_s, ENDLESS)
    calls = GrpcPort(front, handlers, access, models.statistics, limits)
    for one in models.by_name.values():
        _use_inputs(front, one)
    calls.attach()
    port = front.start(options.host, options.port)
    http = None
    try:
        if options.http_port is not None:
            http = await _serve_http(models, options, access, max_requests)
        get_default_logger().info(
            "%s is served at %s:%d (Open Inference Protocol over gRPC)", models.names, options.host, port
        )
        if observer.address:
            get_default_logger().info("metrics and status are at %s", observer.address)
        ready = dict.fromkeys(models.by_name, True)  # as their first versions were loaded
        watches = [_follow_model(front, one, states, ready) for one in models.by_name.values()]
        watches += [_reread_shares(one.canary) for one in models.by_name.values() if one.canary is not None]
        tasks = [asyncio.create_task(watch) for watch in watches]
        # Ready only now: a probe that passes earlier would send requests to a closed port.
        observer.serving = True
        with _advertised(options, port, observer.address):
            await stop.wait()
        observer.serving = False
        for task in tasks:
            task.cancel()
        # Load balancers must see NOT_SERVING before the port closes.
        await states.enter_graceful_shutdown()
        calls.end(WATCH, NOT_SERVING)
    finally:
        # Its thread uses what is closed next.
        stopping = asyncio.to_thread(front.stop, _DRAIN_S)
        await asyncio.gather(stopping, *(() if http is None else (http.cleanup(),)))
        calls.detach()
    get_default_logger().info("%s is no longer served", models.names)


async def _serve_http(
    models: Models, options: ServingOptions, access: Access, max_requests: int
) -> web.AppRunner:
    endpoint = HttpEndpoint(models, asyncio.Semaphore(max_requests), options.timeout_s, access)
    assert options.http_port is not None
    runner, port = await endpoint.listen(options.host, options.http_port, options.max_request_bytes)
    scheme = "http" if access.tls is None else "https"
    for name in models.by_name:
        get_default_logger().info(
            "%s is served at %s://%s:%d/v2/models/%s", name, scheme, options.host, port, name
        )
    return runner


@contextlib.contextmanager
def _advertised(options: ServingOptions, port: int, status_address: str) -> Iterator[None]:
    """Shows the server in its job during the block, as soon as the broker answers. Waits for nothing."""
    if options.nats_url is None:
        yield
        return
    stopped = threading.Event()
    arguments = options, f"{env.get_advertise_host(options.host)}:{port}", status_address, stopped
    thread = threading.Thread(target=_advertise, args=arguments, name="persia-register", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_LEAVE_S)


def _advertise(options: ServingOptions, address: str, status_address: str, stopped: threading.Event) -> None:
    # Predictions need no broker: while it is away the server is not shown, and keeps answering.
    index, has_warned = options.replica_index, False
    while not stopped.is_set():
        try:
            connection = JobConnection.connect(
                f"{SERVING} {index}", INFERENCE, url=options.nats_url, deadline_s=_CONNECT_S
            )
            with contextlib.closing(connection):
                connection.advertise(
                    SERVING, index, options.replica_size, address=address, status_address=status_address
                )
                get_default_logger().info("%s is shown in the job %s", address, env.get_job_name())
                stopped.wait()
        except FailedPreconditionError as failure:
            get_default_logger().error("this server is not shown in persia-launcher status: %s", failure)
            return
        except PersiaError as failure:
            if not has_warned:
                get_default_logger().warning(
                    "this server is not shown in persia-launcher status for now: %s", failure
                )
                has_warned = True
            stopped.wait(1.0)


class _Attempts:
    """What is tried again and again, in a `with` block: its errors are logged once each, and end nothing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told: str | None = None  # since it last succeeded

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, failure: BaseException | None, _where: object) -> bool:
        if not isinstance(failure, Exception):
            self._told = None
            return False
        if (text := f"{type(failure).__name__}: {failure}") != self._told:
            get_default_logger().error("cannot %s: it is tried again", self._what, exc_info=failure)
            self._told = text
        return True


async def _reread_shares(canary: Canary) -> None:
    """The front draws by them without Python. Apart from health, which may wait for workers."""
    reading = _Attempts("read the shares of the canary")
    while True:
        with reading:
            canary.reread_shares()
        await asyncio.sleep(_HEALTH_INTERVAL_S)


async def _follow_model(
    front: ServingFront, inference: Inference, states: health.aio.HealthServicer, ready: dict[str, bool]
) -> None:
    """Reports health by the name of the model, and of the server as a whole ("", and the service's name).

    `ready`: of all models.
    """
    model = inference.model
    used = None  # the version whose inputs the front knows
    using = _Attempts("tell the gRPC port what the model takes")
    asking, reporting = _Attempts("tell whether the model is ready"), _Attempts("report the server's health")
    codes = health_pb2.HealthCheckResponse
    while True:
        with using:
            if (current := model.current) is not used:
                # Requests that the front reads by the features of the version before are checked again.
                _use_inputs(front, inference)
                used = current
        is_ready = False
        with asking:
            # On a thread: with remote rows it asks workers, and the event loop answers requests meanwhile.
            is_ready = await asyncio.to_thread(model.not_ready) is None
        ready[model.settings.name] = is_ready
        are_ready = all(ready.values())
        with reporting:
            for name, answers in (("", are_ready), (SERVICE, are_ready), (model.settings.name, is_ready)):
                await states.set(name, codes.SERVING if answers else codes.NOT_SERVING)
        await asyncio.sleep(_HEALTH_INTERVAL_S)
