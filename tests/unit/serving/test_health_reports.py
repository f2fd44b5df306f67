"""The health that the server reports follows its model, whatever fails on the way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health, health_pb2

from persia.serving import server

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class Model:
    """Its inputs can never be told, and whether it is ready not while `failure` is set."""

    settings = SimpleNamespace(name="m")
    failure: Exception | None = None
    num_asked = 0

    @property
    def current(self) -> Any:
        raise KeyError("no inputs")

    def not_ready(self) -> str | None:
        self.num_asked += 1
        if self.failure is not None:
            raise self.failure
        return None


async def follow(model: Model) -> list[Any]:
    """The states of the model: before, during and after its failures."""
    states = health.aio.HealthServicer()
    inference: Any = SimpleNamespace(model=model, canary=None)
    front: Any = None
    reports = asyncio.create_task(server._follow_model(front, inference, states, {"m": False}))

    async def reported() -> Any:
        asked = model.num_asked
        while model.num_asked < asked + 3:  # so that those before were reported
            await asyncio.sleep(0.001)
        request = health_pb2.HealthCheckRequest(service="m")
        return (await states.Check(request, None)).status

    seen = []
    for failure in (None, ValueError("one"), ValueError("two"), None):
        model.failure = failure
        seen.append(await asyncio.wait_for(reported(), 60))
    reports.cancel()
    return seen


def test_failures_are_reported_as_not_serving_and_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []

    def error(*_: object, exc_info: object) -> None:
        logged.append(str(exc_info))

    monkeypatch.setattr(server, "_HEALTH_INTERVAL_S", 0.001)
    monkeypatch.setattr(server, "get_default_logger", lambda: SimpleNamespace(error=error))
    assert asyncio.run(follow(Model())) == [SERVING, NOT_SERVING, NOT_SERVING, SERVING]
    assert logged == ["'no inputs'", "one", "two"]
