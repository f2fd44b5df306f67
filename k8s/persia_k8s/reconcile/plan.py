"""The plan of a pass, and the inputs that it is made from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from persia_k8s.builders.manifest import Images, Manifest, Scale
from persia_k8s.job import Job
from persia_k8s.observation import Observation, PodView
from persia_k8s.status import Condition, JobStatus

# Whole seconds, as Kubernetes writes times.
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def time_text(time: datetime) -> str:
    """RFC 3339, as Kubernetes writes it."""
    return time.strftime(_TIME_FORMAT)


def parse_time(text: str) -> datetime:
    """The time in a text of `time_text`."""
    return datetime.strptime(text, _TIME_FORMAT).replace(tzinfo=timezone.utc)


@dataclass(frozen=True)
class Event:
    """A Kubernetes event of the job. `is_warning`: an operator should look."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(kw_only=True)
class Plan:
    """Actions in the order of the fields, and the seconds until the next pass at the latest."""

    # Manifests first and pods last: pods find their services and servers.
    issues_certificates: bool = False  # valid until what the status says
    apply: list[Manifest] = field(default_factory=list)
    delete_objects: list[tuple[str, str]] = field(default_factory=list)  # (kind, name)
    delete_pods: list[PodView] = field(default_factory=list)
    create_pods: list[Manifest] = field(default_factory=list)
    # Judged by the API server, and not created. None: accepted, or there is none.
    trial_pod: Manifest | None = None
    events: list[Event] = field(default_factory=list)
    status: JobStatus
    delete_job: bool = False
    # A backstop: changes wake the task, but a broken watch may miss one.
    look_again_s: float = 30.0
    # Until something is due: unlike the backstop, it may not come later because there are many jobs.
    due_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The inputs of a pass, and the plan that it fills.

    `job` has the standbys with which it has started, and `wanted_standbys` is what the spec says now.
    `others`: parameter servers of another generation than the one that has the rows; `observed` lacks them.
    """

    job: Job
    wanted_standbys: int
    before: JobStatus
    observed: Observation
    images: Images
    now: datetime
    scale: Scale
    plan: Plan
    others: tuple[PodView, ...] = ()

    def update(self, **changes: Any) -> None:
        self.plan.status = replace(self.plan.status, **changes)

    def set_condition(self, kind: str, status: bool, reason: str, message: str = "") -> bool:
        """Returns whether this is news."""
        old = self.plan.status.condition(kind)
        new = Condition(type=kind, status=status, reason=reason, message=message)
        self.plan.status = self.plan.status.with_condition(new, time_text(self.now))
        return old is None or (old.status, old.reason, old.message) != (status, reason, message)

    def event(self, reason: str, message: str, *, is_warning: bool = False) -> None:
        self.plan.events.append(Event(reason, message, is_warning))

    def after(self, seconds: float) -> datetime:
        return self.now + timedelta(seconds=seconds)
