"""What each role of a job may publish and subscribe to on the broker, and the broker's list of users.

Subjects are those of docs/wire_format.md with "*" for the job: one broker serves all jobs of a secret.
Replies go to inboxes that only the role which asked reads, and only its receiver publishes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia.messaging.subjects import (
    DATA_LOADER,
    EMBEDDING_PARAMETER_SERVER,
    EMBEDDING_WORKER,
    NN_WORKER,
    SERVING,
)
from persia.security import nats_login
from persia.security.secret import ADMIN, INFERENCE, JOB, LOADER, MONITOR, ROLES, SERVER, TRAINER, WORKER

_JOB = "persia.*"
_IDS, _BATCHES, _ENDS = f"{_JOB}.ids.*", f"{_JOB}.batch.*", f"{_JOB}.end.*"
_POSITIONS, _TAKEN = f"{_JOB}.position.*", f"{_JOB}.taken.*"
_OF_LOADERS = (_IDS, _BATCHES, _ENDS, _POSITIONS)
_OF_RANKS = (*_OF_LOADERS, _TAKEN)
_CHECKPOINTS, _TRAINING_DUMP = f"{_JOB}.checkpoint.*", f"{_JOB}.checkpoint.training"
_REPLICAS = f"{_JOB}.replica.*.*"
_RESIZE, _RESIZES = f"{_JOB}.resize", f"{_JOB}.resize.*.*"
# A replica answers within the deadline of the request; the broker forgets a question after this time.
_REPLY_WITHIN = "10m"


def _advertise(*services: str) -> list[str]:
    return [f"{_JOB}.advertise.{service}" for service in services]


def _who(*services: str) -> list[str]:
    return [f"{_JOB}.who.{service}" for service in services]


# Asking who is there is open to every role: `_who("*")` is added to each.
_PUBLISH: Mapping[str, list[str]] = {
    # With PERSIA_EMBEDDED the training process is also the embedding worker, and its loaders may be threads.
    TRAINER: [*_advertise(NN_WORKER, EMBEDDING_WORKER, DATA_LOADER), *_OF_RANKS, _CHECKPOINTS],
    LOADER: [*_advertise(DATA_LOADER), *_OF_LOADERS],
    WORKER: _advertise(EMBEDDING_WORKER),
    SERVER: [*_advertise(EMBEDDING_PARAMETER_SERVER), _REPLICAS],
    INFERENCE: _advertise(SERVING),
    MONITOR: [],
    ADMIN: [_CHECKPOINTS, _RESIZE, _RESIZES],  # on Kubernetes it also coordinates the resize
}
_SUBSCRIBE: Mapping[str, list[str]] = {
    TRAINER: [*_who(NN_WORKER, EMBEDDING_WORKER, DATA_LOADER), *_advertise("*"), *_OF_RANKS, _TRAINING_DUMP],
    LOADER: [*_who(DATA_LOADER), *_advertise(NN_WORKER, EMBEDDING_WORKER)],
    WORKER: [
        *_who(EMBEDDING_WORKER),
        *_advertise(NN_WORKER, EMBEDDING_WORKER, EMBEDDING_PARAMETER_SERVER),
        _IDS,
    ],
    SERVER: [
        *_who(EMBEDDING_PARAMETER_SERVER),
        *_advertise(EMBEDDING_PARAMETER_SERVER),
        _CHECKPOINTS,
        _REPLICAS,
        _RESIZES,
    ],
    INFERENCE: _who(SERVING),
    MONITOR: _advertise("*"),  # `persia-launcher status --watch` follows the job
    ADMIN: [],
}
_NOT_SUBSCRIBE: Mapping[str, list[str]] = {SERVER: [_TRAINING_DUMP]}


def permissions(role: str) -> dict[str, Any]:
    """The permissions of `role`, as the broker's configuration has them."""
    inbox = f"{nats_login(role).inbox_prefix}.>"
    return {
        "publish": {"allow": [*_who("*"), *_PUBLISH[role]]},
        "subscribe": {"allow": [inbox, *_SUBSCRIBE[role]], "deny": _NOT_SUBSCRIBE.get(role, [])},
        "allow_responses": {"max": 1, "expires": _REPLY_WITHIN},
    }


def broker_users() -> list[dict[str, Any]]:
    """All users of a broker, with their passwords: for its configuration, and for no other eyes.

    `JOB`, who holds the whole secret and could log in as any role, has no limits.
    """
    logins = {role: nats_login(role) for role in (JOB, *ROLES)}
    return [
        {
            "user": login.user,
            "password": login.password,
            **({} if role == JOB else {"permissions": permissions(role)}),
        }
        for role, login in logins.items()
    ]
