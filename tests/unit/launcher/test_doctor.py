"""What `persia-launcher doctor` finds on a machine: each check when all is well, and when it is not."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from persia import env
from persia._version import __version__
from persia.launcher import cli, doctor_checks
from persia.launcher.doctor_checks import Finding, Level, Settings, run_checks

NOTHING = Settings(global_config=None, embedding_config=None, nats_url=None, job_name="j")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    env.reload_env()


def found(topic: str, **settings: Any) -> list[Finding]:
    """The findings of one check; none of them may come without a remedy when it is not good."""
    values = {**vars(NOTHING), **settings}
    own = [finding for about, finding in run_checks(Settings(**values)) if about == topic]
    assert all(finding.remedy for finding in own if finding.level is not Level.OK)
    return own


def only(topic: str, **settings: Any) -> tuple[Level, str]:
    (finding,) = found(topic, **settings)
    return finding.level, finding.what


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only("python")[0] is Level.OK
    monkeypatch.setattr(doctor_checks, "sys", SimpleNamespace(version_info=(3, 9, 1)))
    assert only("python")[0] is Level.FAIL


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.level for finding in found("packages")} == {Level.OK}
    version = importlib.metadata.version

    def without_nats(name: str) -> str:
        if name == "nats-py":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_nats)
    (missing,) = [finding for finding in found("packages") if finding.level is not Level.OK]
    assert (missing.level, missing.what) == (Level.FAIL, "nats-py is not installed")
    assert missing.remedy.startswith("pip install nats-py")


@pytest.mark.parametrize(
    ("version", "simd", "level"),
    [(__version__, "avx2", Level.OK), (__version__, "scalar", Level.WARN), ("0.0.1", "avx2", Level.FAIL)],
)
def test_the_compiled_module(monkeypatch: pytest.MonkeyPatch, version: str, simd: str, level: Level) -> None:
    monkeypatch.setattr(doctor_checks, "_native", SimpleNamespace(__version__=version, simd_level=simd))
    assert only("native")[0] is level


@pytest.mark.parametrize(
    ("cuda", "is_available", "level", "text"),
    [
        (None, False, Level.OK, "built for the CPU"),
        ("12.8", True, Level.OK, "2 GPUs"),
        ("12.8", False, Level.WARN, "no GPU is usable"),
    ],
)
def test_torch(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, is_available: bool, level: Level, text: str
) -> None:
    torch = SimpleNamespace(
        __version__="2.9",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: is_available, device_count=lambda: 2),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor_checks, "_GPU", Path("/nowhere"))
    assert only("torch")[0] is level
    assert text in only("torch")[1]


def test_torch_of_the_wrong_build_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = SimpleNamespace(
        __version__="2.9",
        version=SimpleNamespace(cuda=None),
        cuda=SimpleNamespace(is_available=lambda: False),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor_checks, "_GPU", tmp_path)
    assert only("torch") == (Level.WARN, "torch 2.9, built for the CPU, while there is a GPU")
    monkeypatch.setitem(sys.modules, "torch", None)
    level, what = only("torch")
    assert level is Level.FAIL
    assert what.startswith("torch cannot be imported")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PERSIA_NATS_URL", "localhost:4222"),
        ("PERSIA_JOB_NAME", "a.b"),
        ("LOG_LEVEL", "loud"),
        ("PERSIA_LOG_FORMAT", "xml"),
        ("PERSIA_DEADLINE_SEC", "soon"),
        ("PERSIA_LOADER_SILENCE_SEC", "0"),
        ("PERSIA_METRICS_PORT", "70000"),
        ("PERSIA_HEALTH_PORT", "x"),
        ("PERSIA_OTLP_ENDPOINT", "collector"),
        ("PERSIA_OTLP_TRACE_ONE_IN", "-1"),
        ("PERSIA_NUM_THREADS", "0"),
        ("PERSIA_WIRE_DTYPE", "float8"),
        ("PERSIA_EMBEDDED", "yes"),
        ("PERSIA_SKIP_CHECK_DATA", "2"),
        ("PERSIA_LAUNCHER_VERBOSE", "on"),
        ("RANK", "one"),
        ("REPLICA_INDEX", "3"),
    ],
)
def test_a_variable_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    assert only("environment") == (Level.OK, "environment variables can be used")
    monkeypatch.setenv(name, value)
    level, what = only("environment")
    assert level is Level.FAIL
    assert name in what or (name.startswith("REPLICA_") and "REPLICA_SIZE" in what)


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_BIND_HOST", "0.0.0.0")
    monkeypatch.setenv("PERSIA_SOCKET_IFNAME", "nope0")
    level, what = only("environment")
    assert level is Level.FAIL
    assert "PERSIA_SOCKET_IFNAME='nope0'" in what


def test_a_proxy_between_processes_and_their_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert {finding.level for finding in found("environment")} == {Level.OK}
    monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", "gateway:9091")
    assert [finding.level for finding in found("environment")] == [Level.OK, Level.WARN]


def test_configuration_files(tmp_path: Path) -> None:
    assert [finding.level for finding in found("configuration")] == [Level.OK, Level.OK]
    (tmp_path / "good.yml").write_text("slots_config:\n  user:\n    dim: 8\n")
    (tmp_path / "bad.yml").write_text("common_config:\n  metrics_config:\n    enable_metric: true\n")
    bad, good = found(
        "configuration",
        global_config=str(tmp_path / "bad.yml"),
        embedding_config=str(tmp_path / "good.yml"),
    )
    assert bad.level is Level.FAIL
    assert "enable_metric" in bad.what
    assert (good.level, good.what) == (Level.OK, f"embedding config {tmp_path / 'good.yml'}")
    (missing, _) = found("configuration", global_config=str(tmp_path / "no_such_file.yml"))
    assert missing.level is Level.FAIL
    assert "no_such_file.yml" in missing.what


def test_ports() -> None:
    assert found("ports") == []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        level, what = only("ports", ports=(port,))
        assert level is Level.FAIL
        assert f"port {port} on 127.0.0.1 cannot be listened on" in what
    assert only("ports", ports=(port,)) == (Level.OK, f"port {port} is free")


def test_without_a_broker() -> None:
    assert only("nats") == (Level.WARN, "PERSIA_NATS_URL is not set")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    level, what = only("nats", nats_url=f"nats://127.0.0.1:{port}")  # where nobody listens any more
    assert level is Level.FAIL
    assert str(port) in what


@pytest.mark.parametrize(
    ("soft", "level"), [(1024, Level.WARN), (65536, Level.OK), (resource.RLIM_INFINITY, Level.OK)]
)
def test_limits(monkeypatch: pytest.MonkeyPatch, soft: int, level: Level) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (soft, 65536))
    assert only("limits")[0] is level


@pytest.mark.parametrize(("little", "level"), [(1, Level.OK), (1 << 60, Level.WARN)])
def test_memory(monkeypatch: pytest.MonkeyPatch, little: int, level: Level) -> None:
    monkeypatch.setattr(doctor_checks, "_LITTLE_MEMORY", little)
    assert only("memory")[0] is level


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("always [madvise] never", Level.OK),
        ("always madvise [never]", Level.WARN),
        (None, Level.WARN),
    ],
)
def test_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, level: Level) -> None:
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    monkeypatch.setattr(doctor_checks, "_THP", tmp_path / "enabled")
    assert only("huge pages")[0] is level


def test_a_check_that_breaks_is_a_finding_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_what: int) -> tuple[int, int]:
        raise RuntimeError("not on this kernel")

    monkeypatch.setattr(resource, "getrlimit", broken)
    assert only("limits") == (Level.FAIL, "RuntimeError: not on this kernel")
    assert only("memory")[0] is not Level.FAIL


def test_the_exit_code_and_both_forms_of_the_report() -> None:
    command = ["doctor", "--job-name", "j"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        text = CliRunner().invoke(cli, [*command, "--port", port])
        assert text.exit_code == 1
        assert f"fail  ports          port {port} on 127.0.0.1 cannot be listened on" in text.output
        assert f"-> `ss -ltnp 'sport = :{port}'` tells who has it" in text.output
        rows = CliRunner().invoke(cli, [*command, "--port", port, "--json"])
    assert rows.exit_code == 1
    (row,) = [row for row in json.loads(rows.output) if row["topic"] == "ports"]
    assert row["level"] == "fail"
    assert port in row["remedy"]
    assert CliRunner().invoke(cli, [*command, "--port", port]).exit_code == 0
