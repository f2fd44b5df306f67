"""Real Prometheus and Pushgateway processes for tests, from the distribution's packages."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia.messaging.discovery import ServiceInfo
from persia.observability.status import find_processes
from persia.security import http_token
from persia.testing import LocalCluster
from tests.ports import free_port

DEADLINE_S = 180.0
MONITORING = Path(__file__).parents[2] / "monitoring"


def require(program: str) -> str:
    """The path of `program`, or the test is skipped."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed: `./run extras` installs it")
    return path


def get(url: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {http_token()}"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        text: str = answer.read().decode()
        return text


def get_any(url: str) -> tuple[int, str]:
    """Code and text, of refusals, too."""
    try:
        return 200, get(url)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until(condition: Any, what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if value := condition():
                return value
        time.sleep(0.1)
    raise AssertionError(f"not within {DEADLINE_S:g} s: {what}")


@contextlib.contextmanager
def running(command: list[str], ready_url: str, log: Path) -> Iterator[None]:
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            wait_until(lambda: process.poll() is not None or get(ready_url), f"{command[0]}: {log}")
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.kill()


def all_processes(cluster: LocalCluster, number: int, without: str = "") -> list[ServiceInfo]:
    """So many: on a busy machine some may answer late. `without`: a role that is left out."""

    def found() -> list[ServiceInfo] | None:
        processes = [info for info in find_processes(cluster.session) if info.role != without]
        return processes if len(processes) == number else None

    processes: list[ServiceInfo] = wait_until(found, f"{number} processes")
    return processes


class Pages:
    """The /metrics pages of all processes of a job, as they are now."""

    def __init__(self, cluster: LocalCluster, number: int, without: str = "") -> None:
        self._texts: dict[str, list[str]] = {}
        for info in all_processes(cluster, number, without):
            page = get(f"http://{info.status_address}/metrics")
            self._texts.setdefault(info.role, []).append(page)

    def count(self, role: str) -> int:
        return len(self._texts[role])

    def each(self, role: str, name: str) -> list[float]:
        """The values of a metric, which every process of the role must have."""
        found = [
            re.findall(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", text, re.M) for text in self._texts[role]
        ]
        assert all(found), name
        return [float(value) for values in found for value in values]

    def sum(self, role: str, name: str) -> float:
        return sum(self.each(role, name))


class Prometheus:
    """Asks a running one."""

    def __init__(self, address: str) -> None:
        self.address = address

    def query(self, expression: str) -> list[dict[str, Any]]:
        encoded = urllib.parse.urlencode({"query": expression})
        answer = json.loads(get(f"http://{self.address}/api/v1/query?{encoded}"))
        assert answer["status"] == "success", answer
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def rules(self) -> dict[str, str]:
        """The health of each alert's rule: "ok" once it was evaluated without an error."""
        groups = json.loads(get(f"http://{self.address}/api/v1/rules"))["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


@contextlib.contextmanager
def prometheus(
    folder: Path, targets: str = "[]", gateway: str | None = None, tls: Mapping[str, Any] | None = None
) -> Iterator[Prometheus]:
    """With our configuration and alerts, but more frequent; `gateway` in the place of the stack's.

    `targets`: as `persia-launcher status --targets` writes them. `tls`: more settings of the job `persia`.
    """
    (folder / "targets.json").write_text(targets)
    (folder / "token").write_text(http_token())
    shutil.copy(MONITORING / "prometheus" / "alerts.yml", folder)
    config = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (pushed,) = [one for one in config["scrape_configs"] if one["job_name"] == "pushgateway"]
    pushed["static_configs"] = [{"targets": [gateway]}] if gateway else []
    (scraped,) = [one for one in config["scrape_configs"] if one["job_name"] == "persia"]
    scraped.update(tls or {})
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        require("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with running(command, f"http://{address}/-/ready", folder / "prometheus.log"):
        yield Prometheus(address)


@contextlib.contextmanager
def pushgateway(folder: Path) -> Iterator[str]:
    """Its address."""
    address = f"127.0.0.1:{free_port()}"
    # A file of its own: distributions have a default, in which the groups of other runs stand.
    kept = folder / "pushgateway.data"
    command = [
        require("prometheus-pushgateway"),
        f"--web.listen-address={address}",
        f"--persistence.file={kept}",
    ]
    with running(command, f"http://{address}/-/ready", folder / "pushgateway.log"):
        yield address
