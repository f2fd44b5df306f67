"""A child process that measures one case, and the settings it runs under."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from benchmarks.cases import Case

__all__ = ["MALLOC_SETTINGS", "ChildError", "ChildProcess", "Interpreters", "JsonProcess"]

MALLOC_SETTINGS = {
    "default": "",
    # Freed memory is kept, in huge pages, instead of going back to the kernel at each step.
    "tuned": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=0x7fffffffffff",
}
"""Name -> GLIBC_TUNABLES."""

_REPOSITORY = Path(__file__).resolve().parent.parent
_OPEN_DEADLINE_S = 600.0  # filling 50 million rows one thread
_RUN_DEADLINE_S = 300.0
_CLOSE_DEADLINE_S = 30.0
_MAX_REPLY_BYTES = 1 << 20
_SHOWN_ERROR_LINES = 15


class ChildError(RuntimeError):
    """A child failed, or did not answer in time; the message has the end of its standard error."""


@dataclasses.dataclass(frozen=True)
class Interpreters:
    """Which Python runs which system; TFRA cannot share an environment with torch."""

    default: str = sys.executable
    tfra: str | None = None

    def of(self, system: str) -> str | None:
        """The interpreter of `system`; None when it was not given."""
        return self.tfra if system == "tfra" else self.default


class JsonProcess:
    """A child that answers a line of JSON with another; a context manager that ends it.

    Every request has a deadline. `name` is for messages.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], name: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(
            command,
            cwd=_REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._name = name
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # the child ends at the end of its input
        try:
            self._process.wait(_CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended early") from None
        reply: dict[str, Any] = json.loads(self._read_line(request["op"], timeout_s))
        return reply

    def _read_line(self, op: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._process.kill()
                    raise self._failure(f"did not answer {op!r} within {timeout_s:g} s")
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    raise self._failure(f"ended during {op!r}")
                self._received += piece
                if len(self._received) > _MAX_REPLY_BYTES:
                    raise self._failure(f"answered {op!r} with more than {_MAX_REPLY_BYTES} bytes")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _failure(self, what: str) -> ChildError:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()[-_SHOWN_ERROR_LINES:]
        return ChildError("\n".join([f"{self._name} {what}; the end of its output:", *lines]))


class ChildProcess(JsonProcess):
    """Runs `python -m benchmarks.child` for `case`, pinned to `cores`.

    The first `case.threads` of `cores` are used.
    """

    def __init__(self, python: str, case: Case, cores: Sequence[int], malloc: str) -> None:
        if len(cores) < case.threads:
            raise ValueError(f"cores={list(cores)} are fewer than the case's {case.threads} threads")
        command = [python, "-W", "ignore", "-m", "benchmarks.child", *map(str, cores[: case.threads])]
        super().__init__(command, _environment(case.threads, malloc), case.system)
        self._case = case

    def open(self, folder: Path) -> dict[str, Any]:
        """Sets the case up with the batches in `folder`; `step_seconds`, or `unavailable` and why."""
        return self.ask({"op": "open", "case": self._case.to_json(), "folder": str(folder)}, _OPEN_DEADLINE_S)

    def run(self, steps: int) -> dict[str, Any]:
        """Times `steps` steps: `seconds`, `ids`, `samples`."""
        return self.ask({"op": "run", "steps": steps}, _RUN_DEADLINE_S)

    def close(self) -> dict[str, Any]:
        """Ends the measurement: `counters`."""
        return self.ask({"op": "close"}, _CLOSE_DEADLINE_S)


def _environment(threads: int, malloc: str) -> dict[str, str]:
    """This process's environment with the thread counts and the malloc setting of a child."""
    environment = dict(os.environ)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PERSIA_NUM_THREADS"):
        environment[variable] = str(threads)
    environment.pop("GLIBC_TUNABLES", None)
    if MALLOC_SETTINGS[malloc]:
        environment["GLIBC_TUNABLES"] = MALLOC_SETTINGS[malloc]
    return environment
