"""Certificates of the gRPC port while their files are broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from persia.errors import ConfigError
from persia.security import certificates
from persia.security.tls import TlsFiles
from persia.serving.access import grpc_credentials


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    (folder,) = certificates.create(tmp_path, ["inference"], days=1)
    return TlsFiles.of_folder(folder)


def test_broken_files_are_logged_once_and_not_for_each_handshake(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    asked: list[Callable[[], Any]] = []
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda _first, renewed, **_settings: asked.append(renewed)
    )
    grpc_credentials(files)
    (renewed,) = asked
    key = files.key.read_bytes()
    files.key.write_text("half of a key")
    assert [renewed() for _ in range(3)] == [None] * 3
    assert log.text.count("the certificate read before is used") == 1
    files.key.write_bytes(key)
    assert renewed() is not None
    assert renewed() is None


def test_a_file_that_has_gone_is_named(files: TlsFiles) -> None:
    files.key.unlink()
    with pytest.raises(ConfigError, match=r"tls\.key"):
        grpc_credentials(files)
