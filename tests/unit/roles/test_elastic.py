"""A parameter server whose number changes is not ready while it has not all rows, or no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from persia.config import GlobalConfig
from persia.messaging.subjects import Subjects
from persia.observability.sources import ParameterServerSource
from persia.roles.elastic import ElasticServer
from persia.roles.lifetime import ServerOptions


@pytest.mark.parametrize(
    ("sources", "has_handed_over", "reason"),
    [(0, False, None), (0, True, "it has handed its rows over"), (2, False, "it still gathers its rows")],
)
def test_readiness(sources: int, has_handed_over: bool, reason: str | None) -> None:
    session: Any = SimpleNamespace(subjects=Subjects("job"))
    server: Any = SimpleNamespace(has_handed_over=has_handed_over)
    elastic = ElasticServer(session, server, ServerOptions(port=0, sources=sources), 1, GlobalConfig())
    source = ParameterServerSource(server, 0, 1)
    assert source.not_ready() is None
    source.silence = elastic.not_ready
    assert source.not_ready() == reason
