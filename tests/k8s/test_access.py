"""Tokens, limits and TLS of the REST service, with a cluster that answers when the test says so."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner
from persia_k8s import access
from persia_k8s.access import Limits, reloading, tls_context
from persia_k8s.cli import cli
from persia_k8s.cluster import Cluster
from persia_k8s.errors import PersiaK8sError
from persia_k8s.server import make_app

WRITER, READER = {"Authorization": "Bearer writer"}, {"Authorization": "Bearer reader"}


class FakeCluster:
    """Without jobs; notes what is deleted."""

    def __init__(self) -> None:
        self.deleted: list[str] = []

    def jobs(self, _namespace: str) -> list[Any]:
        return []

    def delete_job(self, _namespace: str, name: str) -> None:
        self.deleted.append(name)


def app_of(cluster: FakeCluster, **limits: float) -> web.Application:
    return make_app(cast(Cluster, cluster), "writer", "reader", Limits(**limits))  # type: ignore[arg-type]


def test_a_read_only_token_lists_and_changes_nothing() -> None:
    cluster = FakeCluster()

    async def call() -> None:
        async with TestClient(TestServer(app_of(cluster))) as client:
            assert (await client.get("/listjobs", headers=READER)).status == 200
            for path in ("/apply", "/delete"):
                answer = await client.post(path, headers=READER, json={"job_name": "job"})
                assert answer.status == 403
                assert "may read only" in (await answer.json())["err_msg"]
            assert cluster.deleted == []
            assert (await client.get("/listjobs", headers={"Authorization": "Bearer x"})).status == 401
            assert (await client.post("/delete", headers=WRITER, json={"job_name": "job"})).status == 200
            assert cluster.deleted == ["job"]

    asyncio.run(call())


def test_requests_beyond_the_rate_are_refused_also_with_a_wrong_token() -> None:
    async def call() -> None:
        # A rate so low that a slow machine earns no further request meanwhile.
        async with TestClient(TestServer(app_of(FakeCluster(), per_second=3))) as client:
            answers = [await client.get("/listjobs") for _ in range(60)]
            statuses = [answer.status for answer in answers]
            assert statuses[:3] == [401, 401, 401]
            assert 429 in statuses
            assert answers[statuses.index(429)].headers["Retry-After"] == "1"
            assert (await client.get("/healthz")).status == 200

    asyncio.run(call())


def test_requests_beyond_the_number_at_once_are_refused() -> None:
    async def call() -> None:
        let_go, has_begun = asyncio.Event(), asyncio.Event()

        async def slow(_request: web.Request) -> web.Response:
            has_begun.set()
            await let_go.wait()
            return web.Response()

        app = app_of(FakeCluster(), concurrent=1)
        app.router.add_get("/slow", slow)
        async with TestClient(TestServer(app)) as client:
            first = asyncio.create_task(client.get("/slow", headers=READER))
            await asyncio.wait_for(has_begun.wait(), 60)
            assert (await client.get("/listjobs", headers=READER)).status == 429
            let_go.set()
            assert (await first).status == 200
            assert (await client.get("/listjobs", headers=READER)).status == 200

    asyncio.run(call())


def write_certificate(folder: Path, name: str) -> None:
    """Signed by itself, for 127.0.0.1."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run([*make, *names, *files], check=True, capture_output=True, timeout=240)


def test_a_replaced_certificate_is_used_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_RELOAD_S", 0.05)
    write_certificate(tmp_path, "first")

    async def serves(url: str) -> bool:
        """With the certificate that is in the folder now."""
        trusted = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
        async with ClientSession() as session:
            try:
                async with session.get(url, ssl=trusted) as answer:
                    return answer.status == 200
            except OSError:
                return False

    async def call() -> None:
        context = tls_context(tmp_path)
        app = app_of(FakeCluster())
        app.cleanup_ctx.append(reloading(context, tmp_path))
        server = TestServer(app, scheme="https")
        await server.start_server(ssl=context)
        try:
            url = str(server.make_url("/healthz"))
            assert await serves(url)
            await asyncio.to_thread(write_certificate, tmp_path, "second")
            for _ in range(1200):
                if await serves(url):
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("the new certificate is not used")
        finally:
            await server.close()

    asyncio.run(call())


def test_a_half_written_pair_leaves_the_certificate_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(access, "_RELOAD_S", 0.05)
    write_certificate(tmp_path, "first")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
    (tmp_path / "other").mkdir()
    write_certificate(tmp_path / "other", "second")

    async def call() -> None:
        context = tls_context(tmp_path)
        app = app_of(FakeCluster())
        app.cleanup_ctx.append(reloading(context, tmp_path))
        server = TestServer(app, scheme="https")
        await server.start_server(ssl=context)
        try:
            await asyncio.sleep(0.1)
            (tmp_path / "tls.crt").write_bytes((tmp_path / "other/tls.crt").read_bytes())
            for _ in range(1200):
                if "belong together" in capsys.readouterr().out:
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("the half-written pair was not noticed")
            url = str(server.make_url("/healthz"))
            async with ClientSession() as session, session.get(url, ssl=trusted) as answer:
                assert answer.status == 200
        finally:
            await server.close()

    asyncio.run(call())


def test_an_encrypted_key_is_refused_without_a_question(tmp_path: Path) -> None:
    write_certificate(tmp_path, "first")
    encrypt = ["openssl", "ec", "-aes128", "-passout", "pass:secret"]
    files = ["-in", str(tmp_path / "tls.key"), "-out", str(tmp_path / "tls.key.new")]
    subprocess.run([*encrypt, *files], check=True, capture_output=True, timeout=240)
    (tmp_path / "tls.key.new").replace(tmp_path / "tls.key")
    with pytest.raises(PersiaK8sError, match="the key is encrypted"):
        tls_context(tmp_path)


def test_one_token_for_readers_and_others_is_refused(tmp_path: Path) -> None:
    for name in ("token", "reader"):
        (tmp_path / name).write_text("a-token-of-some-length\n")
    files = ("--token-file", str(tmp_path / "token"), "--read-token-file", str(tmp_path / "reader"))
    result = CliRunner().invoke(cli, ["server", *files])
    assert result.exit_code == 1
    assert "generate another token for readers" in result.output


@pytest.mark.parametrize(
    ("option", "complaint"),
    [("--read-token-file", "--read-token-file"), ("--tls-dir", "needs tls.crt and tls.key")],
)
def test_a_file_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, option: str, complaint: str
) -> None:
    (tmp_path / "token").write_text("a-token-of-some-length")
    arguments = ["server", "--token-file", str(tmp_path / "token"), option, str(tmp_path / "none")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert complaint in result.output
