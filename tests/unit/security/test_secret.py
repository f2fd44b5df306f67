"""The job's secret: where it is found, how it is created, and what each role can derive."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from persia.errors import ConfigError, PermissionDeniedError
from persia.security import secret
from persia.security.secret import ADMIN, JOB, LOADER, MONITOR, ROLES, Credential, parse


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("PERSIA_JOB_SECRET", raising=False)
    monkeypatch.delenv("PERSIA_JOB_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def test_the_first_process_creates_a_file_for_its_user_alone(home: Path) -> None:
    first = secret.find()
    path = home / "persia" / "job_secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert secret.find() == first
    assert [entry.name for entry in path.parent.iterdir()] == ["job_secret"]


def test_processes_that_start_together_agree(home: Path) -> None:
    code = "from persia.security import secret; print(secret.find().text)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    assert len({process.communicate(timeout=240)[0] for process in processes}) == 1


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o666])
def test_a_file_that_others_can_read_is_refused(home: Path, mode: int) -> None:
    secret.find()
    path = home / "persia" / "job_secret"
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        secret.find()


def test_a_given_file_may_be_granted_to_a_group_but_not_to_all(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mounted"
    path.write_text(secret.find().text + "\n")
    monkeypatch.setenv("PERSIA_JOB_SECRET_FILE", str(path))
    path.chmod(0o440)
    assert secret.find().role == JOB
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="mode 0444"):
        secret.find()


def test_a_place_that_cannot_be_written_names_the_remedy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_JOB_SECRET_FILE", "/proc/none/secret")
    with pytest.raises(ConfigError, match="PERSIA_JOB_SECRET_FILE to a file that this user can write"):
        secret.find()


@pytest.mark.parametrize("text", ["hunter2", "persia1.job.12", "persia1.nobody.00", "persia2.job.00"])
def test_text_that_is_no_credential_is_refused_without_showing_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PERSIA_JOB_SECRET", text)
    with pytest.raises(ConfigError, match="PERSIA_JOB_SECRET has [0-9]+ characters") as error:
        secret.find()
    assert text not in str(error.value)


def test_a_role_has_the_same_keys_as_the_whole_secret_has_for_it() -> None:
    whole = Credential.of_job(os.urandom(32), "test")
    for role in ROLES:
        limited = parse(whole.limited_to(role).text, "test")
        for plane in ("rpc", "nats", "http", "grpc"):
            assert limited.key(plane, "job", role) == whole.key(plane, "job", role)


def test_keys_differ_by_plane_job_and_role() -> None:
    whole = Credential.of_job(os.urandom(32), "test")
    keys = {
        whole.key(plane, job, role)
        for plane in ("rpc", "nats", "http", "grpc")
        for job in ("one", "two")
        for role in (JOB, *ROLES)
    }
    assert len(keys) == 4 * 2 * (1 + len(ROLES))


def test_a_role_cannot_derive_the_keys_of_another() -> None:
    loader = Credential.of_job(os.urandom(32), "here").limited_to(LOADER)
    for other in (JOB, MONITOR, ADMIN):
        with pytest.raises(PermissionDeniedError, match=f"here has .* role 'loader', and {other!r}"):
            loader.key("rpc", "job", other)


def test_nothing_prints_a_secret() -> None:
    credential = Credential.of_job(b"\xab" * 32, "test")
    assert "ab" * 8 not in repr(credential)
    assert "\\xab" not in repr(credential)


def test_a_file_that_no_process_reads_is_not_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = secret.find()
    monkeypatch.setenv("PERSIA_JOB_SECRET", Credential.of_job(b"x" * 32, "test").text)
    with pytest.raises(ConfigError, match="PERSIA_JOB_SECRET is set"):
        secret.replace()
    monkeypatch.delenv("PERSIA_JOB_SECRET")
    assert secret.find() == before


def test_a_new_secret_replaces_the_old_one(home: Path) -> None:
    old = secret.find()
    assert secret.replace() == home / "persia" / "job_secret"
    assert secret.find().secret != old.secret
