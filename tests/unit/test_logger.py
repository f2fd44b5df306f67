"""The published logging API."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import logger as persia_logger
from persia.errors import ConfigError


@pytest.fixture
def name() -> Iterator[str]:
    """A logger name whose handlers are closed afterwards."""
    yield "persia-test-logger"
    log = logging.getLogger("persia-test-logger")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def test_lines_carry_level_and_role(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(persia_logger, "_role", "")
    monkeypatch.setattr(persia_logger, "_index", None)
    persia_logger.set_role("embedding-worker", 3)
    persia_logger.setLogger(name).warning("hello")
    line = capsys.readouterr().err
    assert "WARNING [embedding-worker 3] test_logger.py:" in line
    assert line.endswith("hello\n")
    assert "\033[" not in line


def test_colours_on_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    persia_logger.setLogger(name).error("red")
    assert terminal.getvalue().startswith("\033[31m")


def test_level_comes_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "ERROR")
    assert persia_logger.setLogger(name).level == logging.ERROR
    assert persia_logger.setLogger(name, log_level=logging.DEBUG).level == logging.DEBUG


def test_files_and_redirected_errors(name: str, tmp_path: Path) -> None:
    log = persia_logger.setLogger(
        name,
        log_filename=str(tmp_path / "logs" / "train.log"),
        enable_file_logger=True,
        err_redirect_filepath=str(tmp_path / "error.log"),
        enable_err_redirect=True,
    )
    log.info("fine")
    log.error("broken")
    assert len((tmp_path / "logs" / "train.log").read_text().splitlines()) == 2
    (error_line,) = (tmp_path / "error.log").read_text().splitlines()
    assert error_line.endswith("broken")


def test_the_filter_passes_what_is_above_its_level() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "m", None, None)
    assert not persia_logger.levelFilter(logging.INFO).filter(record)
    assert persia_logger.levelFilter(logging.DEBUG).filter(record)


def test_the_first_default_logger_names_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(persia_logger, "_default_name", None)
    first = persia_logger.get_default_logger(name)
    assert persia_logger.get_default_logger("other") is first
    assert persia_logger.get_logger(name) is first


def test_json_lines_have_role_replica_and_batch(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(persia_logger, "_role", "")
    monkeypatch.setattr(persia_logger, "_index", None)
    monkeypatch.setenv("PERSIA_LOG_FORMAT", "json")
    log = persia_logger.setLogger(name)
    log.info("no role yet")
    persia_logger.set_role("nn-worker", 1)
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("batch %d\nfailed", 17, extra={"batch_id": 17})
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert "role" not in first
    assert first["level"] == "info"
    assert (second["role"], second["replica"], second["batch_id"]) == ("nn-worker", 1, 17)
    assert second["message"] == "batch 17\nfailed"
    assert second["exception"].endswith("ValueError: boom")
    assert second["time"].endswith("+00:00")
    assert second["place"].startswith("test_logger.py:")


def test_another_log_format_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="PERSIA_LOG_FORMAT='xml' must be one of text, json"):
        persia_logger.setLogger(name)
