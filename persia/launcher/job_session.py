"""The connection of a command that looks at a job from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from persia import env

if TYPE_CHECKING:
    from persia.messaging.session import NatsSession

__all__ = ["job_options", "job_session"]

_F = TypeVar("_F", bound=Any)


def job_options(function: _F) -> _F:
    """`--nats-url` and `--job-name`, for commands that look at a running job."""
    for option in (
        click.option(
            "--job-name",
            envvar="PERSIA_JOB_NAME",
            show_envvar=True,
            default="default",
            show_default=True,
            help="Name of the job on the NATS server.",
        ),
        click.option(
            "--nats-url", envvar="PERSIA_NATS_URL", show_envvar=True, metavar="URL", help="The job's broker."
        ),
    ):
        function = option(function)
    return function


@contextlib.contextmanager
def job_session(
    nats_url: str | None, job_name: str, *, name: str, wait_s: float = 5.0
) -> Iterator[NatsSession]:
    """Raises UnavailableError when no broker answers within `wait_s`."""
    from persia.messaging.session import NatsSession

    url = nats_url or env.require_nats_url()
    with NatsSession(url, job_name, name=name) as session:
        session.connect(wait_s)
        yield session
