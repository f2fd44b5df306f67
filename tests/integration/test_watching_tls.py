"""Programs other than persia read metrics with certificates, as operations.md and security.md say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from persia.observability.http import HttpPort
from persia.security import certificates, http_token

from .watching import DEADLINE_S, prometheus, wait_until

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the folders of the roles. PERSIA_TLS_DIR of this process is `server`."""
    made = tmp_path / "certificates"
    certificates.create(made, ["server", "monitor"], days=1)
    monkeypatch.setenv("PERSIA_TLS_DIR", str(made / "server"))
    return made


@pytest.fixture
def port(folder: Path) -> Iterator[HttpPort]:
    page = b"persia_test 42\n"
    made = HttpPort("127.0.0.1", 0, {("GET", "/metrics"): lambda _query: (200, "text/plain", page)})
    yield made
    made.close()


def test_prometheus_with_the_documented_settings(port: HttpPort, folder: Path, tmp_path: Path) -> None:
    (settings,) = re.findall(
        r"```yaml\n( +scheme: https\n.*?)```", (DOCS / "operations.md").read_text(), re.S
    )
    scraper = tmp_path / "prometheus"
    scraper.mkdir()
    shutil.copytree(folder / "monitor", scraper / "tls")
    targets = json.dumps([{"targets": [f"127.0.0.1:{port.port}"]}])
    with prometheus(scraper, targets, tls=yaml.safe_load(settings)) as asked:
        wait_until(lambda: asked.query("persia_test"), "Prometheus has read the page")
        assert float(asked.query("persia_test")[0]["value"][1]) == 42


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_documented_curl(port: HttpPort, folder: Path) -> None:
    (command,) = re.findall(r"```sh\n(curl --cacert .*?)```", (DOCS / "security.md").read_text(), re.S)
    command = command.replace("9100", str(port.port)).replace("ADDRESS", "127.0.0.1")
    command = command.replace("$(persia-launcher secret token)", http_token())
    result = subprocess.run(
        f"curl --silent --show-error {command.removeprefix('curl')}",
        shell=True,
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.stdout == "persia_test 42\n", result.stderr
