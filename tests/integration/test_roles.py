"""The server processes: they find each other, stop cleanly, refuse bad configs, and survive restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from persia import _native
from persia.checkpoint.protocol import Request, Verb
from persia.errors import DeadlineExceededError, UnavailableError
from persia.messaging.discovery import Directory
from persia.messaging.payloads import FlowReply, IdsRequest, ReplyStatus
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER
from persia.testing import LocalCluster

DEADLINE_S = 120.0
EMBEDDING_CONFIG = {"slots_config": {"user": {"dim": 8}}}


def id_features(ids: list[int]) -> bytes:
    """One sample for each id."""
    offsets = np.arange(len(ids) + 1, dtype=np.uint32)
    return _native.encode_id_features(len(ids), [("user", np.array(ids, dtype=np.uint64), offsets)])


def register(cluster: LocalCluster, payload: bytes) -> FlowReply:
    return FlowReply.decode(cluster.session.request(cluster.session.subjects.ids(0), payload, DEADLINE_S))


def client_of(cluster: LocalCluster) -> _native.RemoteClient:
    workers = Directory(cluster.session).wait_for(EMBEDDING_WORKER, DEADLINE_S)
    cluster.join()
    client = _native.RemoteClient(len(workers))
    for worker in workers:
        client.set_worker(worker.index, worker.address)
    return client


@pytest.fixture
def start_role() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `persia-launcher ROLE ...` with the environment given."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, env: dict[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "persia.launcher", *arguments]
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError("".join(seen))


def await_log(cluster: LocalCluster, name: str, text: str) -> None:
    """What a process has written is read by a thread of this one."""
    deadline = time.monotonic() + DEADLINE_S
    while text not in cluster.logs(name):
        assert time.monotonic() < deadline, cluster.logs(name)
        time.sleep(0.05)


def test_servers_announce_themselves_and_stop_cleanly(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, parameter_servers=2, embedding_workers=2)
    directory = Directory(cluster.session)
    servers = directory.wait_for(EMBEDDING_PARAMETER_SERVER, DEADLINE_S)
    workers = directory.wait_for(EMBEDDING_WORKER, DEADLINE_S)
    assert len({service.address for service in servers + workers}) == 4
    assert len({service.schema for service in servers + workers}) == 1
    for name in ("embedding-worker-1", "embedding-worker-0", "embedding-parameter-server-0"):
        assert cluster.stop(name) == 0, cluster.logs(name)
        await_log(cluster, name, "stopped")
    assert directory.probe(EMBEDDING_WORKER, 0, 0.2) is None
    assert directory.probe(EMBEDDING_PARAMETER_SERVER, 1, DEADLINE_S) == servers[1]


def test_an_embedding_worker_registers_id_features(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG)
    (worker,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, DEADLINE_S)
    first = register(cluster, IdsRequest(0, 1, id_features([1, 2])).encode())
    second = register(cluster, IdsRequest(0, 1, id_features([1, 2])).encode())
    assert (first.status, first.worker_incarnation) == (ReplyStatus.OK, worker.incarnation)
    assert first.reference != second.reference
    client = client_of(cluster)
    client.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))
    reference = _native.BatchReference(0, first.worker_incarnation, first.reference)
    assert client.lookup(reference, requires_grad=True).slots[0].rows.shape == (2, 8)


def test_bad_id_features_are_answered_with_the_reason(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG)
    for payload in (b"", b"\0" * 8, IdsRequest(0, 1, b"garbage!").encode(), IdsRequest(3, 2, b"").encode()):
        reply = register(cluster, payload)
        assert reply.status is ReplyStatus.ERROR
        assert reply.message


def test_a_full_worker_asks_to_try_again(local_cluster):
    cluster = local_cluster(
        embedding_config=EMBEDDING_CONFIG,
        global_config={"embedding_worker_config": {"forward_buffer_size": 2}},
    )
    payload = IdsRequest(0, 1, id_features([1])).encode()
    replies = [register(cluster, payload) for _ in range(3)]
    assert [reply.status for reply in replies] == [ReplyStatus.OK, ReplyStatus.OK, ReplyStatus.FULL]
    assert 5 <= replies[2].retry_ms <= 20


def test_a_worker_follows_a_restarted_parameter_server(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, parameter_servers=2)
    client = client_of(cluster)
    client.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))
    ids = list(range(100))

    def lookup():
        return (
            client.lookup_direct(0, id_features(ids), requires_grad=True, timeout_s=DEADLINE_S).slots[0].rows
        )

    before = np.array(lookup())
    (old,) = [
        service
        for service in Directory(cluster.session).wait_for(EMBEDDING_PARAMETER_SERVER, DEADLINE_S)
        if service.index == 1
    ]
    cluster.restart("embedding-parameter-server-1")
    new = Directory(cluster.session).probe(EMBEDDING_PARAMETER_SERVER, 1, DEADLINE_S)
    assert new is not None
    assert new.incarnation != old.incarnation
    # Initial values depend on the sign and the seed only: the successor makes the same rows.
    np.testing.assert_array_equal(lookup(), before)
    await_log(cluster, "embedding-worker-0", "has restarted")


def test_a_restarted_broker_does_not_disturb_the_servers(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG)
    before = Directory(cluster.session).wait_for(EMBEDDING_WORKER, DEADLINE_S)
    cluster.restart("nats")
    assert Directory(cluster.session).wait_for(EMBEDDING_WORKER, DEADLINE_S) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", [EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER])
def test_a_server_that_waits_for_the_broker_can_be_stopped(start_role, tmp_path, role, number):
    config = tmp_path / "embedding_config.yml"
    config.write_text("slots_config: {user: {dim: 8}}\n")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        env = {
            **os.environ,
            "PERSIA_NATS_URL": f"nats://127.0.0.1:{unused.getsockname()[1]}",
            "LOG_LEVEL": "info",
        }
        process = start_role(role, "--port=0", f"--embedding-config={config}", env=env)
        read_until(process, "waiting for the NATS server")
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0


def test_a_worker_that_waits_for_parameter_servers_can_be_stopped(local_cluster, start_role):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, parameter_servers=0, embedding_workers=0)
    process = start_role(EMBEDDING_WORKER, "--port=0", env=cluster.env)
    read_until(process, "waiting for services")
    process.terminate()
    assert process.wait(DEADLINE_S) == 0


def test_a_worker_that_has_waited_says_what_it_has_found(local_cluster, start_role):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, parameter_servers=0, embedding_workers=0)
    worker = start_role(EMBEDDING_WORKER, "--port=0", env=cluster.env)
    read_until(worker, "waiting for services: no embedding-parameter-server")
    start_role(EMBEDDING_PARAMETER_SERVER, "--port=0", env=cluster.env)
    read_until(worker, "found embedding-parameter-server, 1 of 1")


def test_a_worker_stops_while_calls_to_a_dead_parameter_server_are_pending(local_cluster):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG)
    client = client_of(cluster)
    client.configure(_native.TrainConfig(optimizer="sgd", lr=1.0))
    cluster.kill("embedding-parameter-server-0")
    [worker] = Directory(cluster.session).wait_for(EMBEDDING_WORKER, DEADLINE_S)

    def look_up() -> None:  # again and again at the worker's successor, of which there is none
        with contextlib.suppress(UnavailableError, DeadlineExceededError):
            client.lookup_direct(0, id_features([1]), requires_grad=True, timeout_s=30)

    calls = threading.Thread(target=look_up)
    calls.start()
    time.sleep(0.2)  # the call is under way; if it is not, the test only proves less
    assert cluster.stop("embedding-worker-0") == 0, cluster.logs("embedding-worker-0")
    assert calls.is_alive(), "it did not wait for the call"
    with socket.socket() as unused:  # or the calls might find another test's server there
        unused.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unused.bind(("127.0.0.1", int(worker.address.rpartition(":")[2])))
        calls.join(DEADLINE_S)
    assert not calls.is_alive()


@pytest.mark.parametrize("role", [EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER])
@pytest.mark.parametrize(
    ("variable", "content", "complaint"),
    [
        ("PERSIA_EMBEDDING_CONFIG", None, "no_such_file.yml"),
        ("PERSIA_EMBEDDING_CONFIG", "slots_config: {user: {dimm: 8}}", "dimm"),
        ("PERSIA_GLOBAL_CONFIG", "common_config: {job_typ: Train}", "job_type"),
    ],
)
def test_a_bad_config_ends_the_server_with_one_clean_line(
    start_role, tmp_path, role, variable, content, complaint
):
    good = tmp_path / "good.yml"
    good.write_text("slots_config: {user: {dim: 8}}\n")
    bad = tmp_path / ("no_such_file.yml" if content is None else "bad.yml")
    if content is not None:
        bad.write_text(content)
    # No broker is there: the config is judged before anything is waited for.
    env = {**os.environ, "PERSIA_NATS_URL": "nats://127.0.0.1:1", "PERSIA_EMBEDDING_CONFIG": str(good)}
    process = start_role(role, "--port=0", env={**env, variable: str(bad)})
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert complaint in output
    assert str(bad) in output
    assert len(output.splitlines()) == 1


def test_a_missing_broker_url_is_named(start_role):
    env = {name: value for name, value in os.environ.items() if name != "PERSIA_NATS_URL"}
    process = start_role(EMBEDDING_PARAMETER_SERVER, "--port=0", env=env)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "PERSIA_NATS_URL" in output


def test_another_embedding_config_is_refused_with_both_values(local_cluster, start_role, tmp_path):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, embedding_workers=0)
    other = tmp_path / "other.yml"
    other.write_text("slots_config: {user: {dim: 16}}\n")
    process = start_role(EMBEDDING_WORKER, "--port=0", f"--embedding-config={other}", env=cluster.env)
    output, _ = process.communicate(timeout=DEADLINE_S)
    (server,) = Directory(cluster.session).wait_for(EMBEDDING_PARAMETER_SERVER, DEADLINE_S)
    assert process.returncode == 1
    assert f"embedding config {server.schema}, this process" in output


def test_a_second_replica_at_an_index_is_refused(local_cluster, start_role):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, embedding_workers=0)
    process = start_role(EMBEDDING_PARAMETER_SERVER, "--port=0", env=cluster.env)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "embedding-parameter-server 0 is running already" in output


@pytest.mark.parametrize("role", [EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER])
def test_a_refused_replica_answers_no_request(local_cluster, start_role, role):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG)
    (incumbent,) = Directory(cluster.session).wait_for(role, DEADLINE_S)
    if role == EMBEDDING_WORKER:
        subject = cluster.session.subjects.ids(0)
        payload = IdsRequest(0, 1, id_features([1])).encode()
    else:
        subject = cluster.session.subjects.checkpoint(0)
        payload = Request(verb=Verb.CHANGES, operation="changes").encode()
    newcomer = start_role(role, "--port=0", env=cluster.env)
    num_replies = []
    while newcomer.poll() is None:  # several times in the 0.3 s for which it looks for a conflict
        num_replies.append(len(cluster.session.request_many(subject, payload, 0.05)))
    output, _ = newcomer.communicate(timeout=DEADLINE_S)
    assert f"{role} 0 is running already" in output
    assert max(num_replies) == 1
    assert Directory(cluster.session).probe(role, 0, DEADLINE_S) == incumbent


def test_a_port_in_use_is_named(local_cluster, start_role):
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, parameter_servers=0, embedding_workers=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start_role(EMBEDDING_PARAMETER_SERVER, f"--port={port}", env=cluster.env)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert str(port) in output


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    config = tmp_path / "missing.yml"
    config.write_text("slots_config: {user: {dim: 8}}\n")
    cluster = LocalCluster(embedding_config=config)
    config.unlink()  # the cluster has checked it, and its servers find nothing
    with pytest.raises(Exception, match=r"missing\.yml"):
        cluster.__enter__()
    assert all(process.exit_code is not None for process in cluster.processes)


def test_waiting_for_a_process_that_does_not_end_shows_its_output(local_cluster, tmp_path):
    script = tmp_path / "loader.py"
    script.write_text("print('I sleep'); import time; time.sleep(1000)")
    cluster = local_cluster(embedding_config=EMBEDDING_CONFIG, parameter_servers=0, embedding_workers=0)
    process = cluster.start_loader(script)
    deadline = time.monotonic() + DEADLINE_S
    while "I sleep" not in cluster.logs("data-loader-0") and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(DeadlineExceededError, match="I sleep"):
        cluster.wait(process, 0.1)
