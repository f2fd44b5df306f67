"""Logging as the published API has it, on the standard library.

One line per record: time, level, role and replica of this process, place, message. The level comes from
`LOG_LEVEL`. `PERSIA_LOG_FORMAT=json` makes each line an object, for log collectors. Colours appear on a
terminal only, so that files and supervisors get plain text.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import datetime, timezone
from pathlib import Path

from persia import env

STREAM_FORMAT = "%(asctime)s %(levelname)s %(role)s%(filename)s:%(lineno)d %(message)s"
FILE_FORMAT = STREAM_FORMAT

_COLOURS = {
    logging.DEBUG: 36,
    logging.INFO: 32,
    logging.WARNING: 33,
    logging.ERROR: 31,
    logging.CRITICAL: 35,
}

_lock = threading.Lock()
_default_name: str | None = None
_role = ""  # before set_role
_index: int | None = None
# What every record has; all else came with `extra`.
_OWN_FIELDS = {*vars(logging.makeLogRecord({})), "role", "message", "asctime", "taskName"}


def set_role(role: str, index: int) -> None:
    """Marks every later record of this process with its role and replica: "[embedding-worker 0]"."""
    global _role, _index
    _role, _index = role, index


class _RoleFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.role = f"[{_role} {_index}] " if _role else ""
        return True


class _JsonFormatter(logging.Formatter):
    """One object a line. `extra={"batch_id": ...}` and its like become keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "role": _role or None,
            "replica": _index,
            "pid": record.process,
            "thread": record.threadName,
            "place": f"{record.filename}:{record.lineno}",
            "message": record.getMessage(),
        }
        values.update((key, value) for key, value in vars(record).items() if key not in _OWN_FIELDS)
        # A field of its own: collectors cut records at line breaks.
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps({key: value for key, value in values.items() if value is not None}, default=str)


class _ColourFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"\033[{_COLOURS.get(record.levelno, 0)}m{super().format(record)}\033[0m"


class levelFilter(logging.Filter):  # noqa: N801 - the published name
    """Passes records above `level` only."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > self.level


def setLogger(  # noqa: N802 - the published name
    name: str,
    log_level: int | None = None,
    log_filename: str = "train.log",
    enable_file_logger: bool = False,
    err_redirect_filepath: str = "error.log",
    enable_err_redirect: bool = False,
    err_redirect_level: int = logging.INFO,
) -> logging.Logger:
    """Sets up the logger `name` and returns it; setting it up again replaces its handlers.

    Args:
        log_level: a `logging` level; None takes `LOG_LEVEL`.
        log_filename: file to append to when `enable_file_logger`.
        err_redirect_filepath: file that gets the records above `err_redirect_level` when
            `enable_err_redirect`.
    """
    logger = logging.getLogger(name)
    # Notebooks run the cell again: a second handler would print each record twice.
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(env.get_log_level().upper() if log_level is None else log_level)
    # The root logger may have handlers of its own, which would print each record again.
    logger.propagate = False
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_formatter(coloured=sys.stderr.isatty()))
    _add_handler(logger, stream)
    if enable_file_logger:
        _add_handler(logger, _file_handler(log_filename))
    if enable_err_redirect:
        handler = _file_handler(err_redirect_filepath)
        handler.addFilter(levelFilter(err_redirect_level))
        _add_handler(logger, handler)
    return logger


def _formatter(*, coloured: bool) -> logging.Formatter:
    if env.get_log_format() == "json":
        return _JsonFormatter()
    return (_ColourFormatter if coloured else logging.Formatter)(STREAM_FORMAT)


def _file_handler(path: str) -> logging.Handler:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # `delay`: a run without errors leaves no empty file behind.
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(_formatter(coloured=False))
    return handler


def _add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
    handler.addFilter(_RoleFilter())
    logger.addHandler(handler)


def get_logger(name: str) -> logging.Logger:
    """The logger `name`, set up with the defaults at its first use."""
    with _lock:
        logger = logging.getLogger(name)
        return logger if logger.handlers else setLogger(name)


def get_default_logger(name: str | None = None, **options: object) -> logging.Logger:
    """The process' default logger. The first call decides its name ("log" if none is given) and its
    `setLogger` options.
    """
    global _default_name
    with _lock:
        # Under the lock: two threads that log first would each add a handler.
        if _default_name is None:
            _default_name = name or "log"
            return setLogger(_default_name, **options)  # type: ignore[arg-type]
        return logging.getLogger(_default_name)
