"""Which role a process proves when it installs several."""

from __future__ import annotations

import pytest

from persia.errors import PermissionDeniedError
from persia.security import identity, secret
from persia.security.secret import INFERENCE, LOADER, TRAINER


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roles in the order in which the native module gets them."""
    roles: list[str] = []
    monkeypatch.setattr(identity, "_installed", None)
    monkeypatch.setattr(identity._native, "set_identity", lambda role, _key, _accepted: roles.append(role))
    return roles


def test_a_lesser_role_does_not_replace_a_greater_one(proven: list[str]) -> None:
    for role in (LOADER, INFERENCE, LOADER, TRAINER, INFERENCE, LOADER):
        identity.install(role)
    assert proven == [LOADER, INFERENCE, TRAINER]


def test_a_trainer_needs_no_credential_for_what_it_may_do_already(
    proven: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_JOB_SECRET", secret.find().limited_to(TRAINER).text)
    with pytest.raises(PermissionDeniedError):
        identity.install(INFERENCE)
    identity.install(TRAINER)
    identity.install(INFERENCE)
    assert proven == [TRAINER]
