"""Certificates of jobs: who gets which, when they are renewed, and that persia's processes use them."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from control_plane import ADMIN, OPERATOR, ControlPlane
from cryptography import x509
from harness import Kube, Namespace, OperatorProcess, job_manifest
from kubelet import FakeKubelet
from persia_k8s.builders.manifest import Images
from persia_k8s.certificates import certificate_secrets
from persia_k8s.cluster import Cluster, ClusterError
from persia_k8s.errors import SpecError
from persia_k8s.job import Job
from persia_k8s.observation import Observation
from persia_k8s.reconcile import reconcile
from persia_k8s.status import JobStatus

from persia.security.tls import TlsFiles

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)
TLS = {"security": {"tls": True}}
MASTER = bytes(range(32))
ROLES = {"nats", "embedding-ps", "embedding-worker", "nn-worker", "dataloader", "rows", "client"}


def make_job(uid: str = "11111111-2", **spec: Any) -> Job:
    resource = job_manifest(**{**TLS, **spec})
    created = "2029-12-01T00:00:00Z"
    resource["metadata"] |= {"namespace": "n", "uid": uid, "generation": 1, "creationTimestamp": created}
    return Job.from_object(resource)


def folders(root: Path, secrets: list[dict[str, Any]]) -> dict[str, Path]:
    """The content of each Secret in a folder like PERSIA_TLS_DIR, by role."""
    made = {}
    for secret in secrets:
        folder = made[secret["metadata"]["labels"]["persia.com/role"]] = root / secret["metadata"]["name"]
        folder.mkdir(parents=True)
        for name, text in secret["data"].items():
            (folder / name).write_bytes(base64.b64decode(text))
    return made


def issue(root: Path, job: Job, master: bytes = MASTER) -> dict[str, Path]:
    now = datetime.now(timezone.utc)
    job = replace(job, created="")  # not in 2029
    return folders(root, certificate_secrets(job, master, now, now + timedelta(days=9)))


def talk(server: Path, client: Path) -> str:
    """A handshake of two processes with these folders; the name in the server's certificate."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(60)

    def serve() -> None:
        try:
            with TlsFiles.of_folder(server).server_context().wrap_socket(ends[0], server_side=True) as peer:
                peer.sendall(b"hello")
        except OSError:
            ends[0].close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with TlsFiles.of_folder(client).client_context().wrap_socket(ends[1]) as peer:
            assert peer.recv(5) == b"hello"  # in TLS 1.3 a refused client learns it here
            return str(dict(pair[0] for pair in peer.getpeercert()["subject"])["commonName"])
    finally:
        thread.join(60)


def test_every_role_has_a_certificate_that_the_others_accept(tmp_path: Path) -> None:
    made = issue(tmp_path, make_job())
    assert set(made) == ROLES
    for role, folder in made.items():
        assert talk(folder, made["client"]) == f"persia {role}"
        assert talk(made["nats"], folder) == "persia nats"


def test_renewed_certificates_and_old_ones_trust_each_other(tmp_path: Path) -> None:
    old, new = issue(tmp_path / "old", make_job()), issue(tmp_path / "new", make_job())
    talk(old["embedding-ps"], new["embedding-worker"])
    talk(new["embedding-ps"], old["embedding-worker"])


@pytest.mark.parametrize("other", ["job", "operator"])
def test_certificates_of_another_job_are_refused(tmp_path: Path, other: str) -> None:
    mine = issue(tmp_path / "mine", make_job())
    others = (
        issue(tmp_path / "other", make_job(uid="22222222-2"))
        if other == "job"
        else issue(tmp_path / "other", make_job(), master=bytes(32))
    )
    with pytest.raises(ssl.SSLError, match="(?i)certificate"):
        talk(mine["embedding-ps"], others["embedding-worker"])


def test_certificates_name_the_service_and_end_in_time() -> None:
    secrets = certificate_secrets(make_job(), MASTER, NOW, NOW + timedelta(days=9))
    nats = next(secret for secret in secrets if secret["metadata"]["name"] == "job-tls-nats-11111111")
    assert nats["type"] == "kubernetes.io/tls"
    assert nats["metadata"]["ownerReferences"][0]["uid"] == "11111111-2"
    certificate = x509.load_pem_x509_certificate(base64.b64decode(nats["data"]["tls.crt"]))
    assert certificate.not_valid_after_utc == NOW + timedelta(days=9)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "job-nats.n.svc" in names.get_values_for_type(x509.DNSName)
    authority = x509.load_pem_x509_certificate(base64.b64decode(nats["data"]["ca.crt"]))
    assert authority.not_valid_before_utc < datetime(2029, 12, 1, tzinfo=timezone.utc)


def one_pass(job: Job, before: JobStatus, now: datetime = NOW) -> Any:
    return reconcile(job, before, Observation(objects={}), Images(cpu="cpu", cuda="cuda"), now)


def test_certificates_are_renewed_after_two_thirds_of_their_lifetime() -> None:
    job = make_job(security={"tls": True, "certificateDays": 30})
    plan = one_pass(job, JobStatus())
    assert plan.issues_certificates
    assert plan.status.certificates_until == "2030-01-31T00:00:00Z"
    later = one_pass(job, plan.status, NOW + timedelta(days=19))
    assert not later.issues_certificates
    assert later.due_s == 86_400
    due = one_pass(job, later.status, NOW + timedelta(days=20))
    assert due.issues_certificates
    assert due.status.certificates_until == "2030-02-20T00:00:00Z"
    assert "CertificatesRenewed" in [event.reason for event in due.events]


def test_a_job_keeps_what_it_started_with_until_it_is_suspended() -> None:
    plain, encrypted = make_job(security={"tls": False}), make_job()
    started = one_pass(plain, JobStatus()).status
    assert started.tls is False
    plan = one_pass(encrypted, started)
    assert not plan.issues_certificates
    assert "PERSIA_TLS_DIR" not in str(plan.apply)
    applied = plan.status.condition("SpecApplied")
    assert not applied.status
    assert "security.tls: true takes effect" in applied.message
    suspended = one_pass(make_job(suspend=True), plan.status).status
    resumed = one_pass(encrypted, suspended).status
    plan = one_pass(encrypted, resumed)
    assert plan.issues_certificates
    assert "PERSIA_TLS_DIR" in str(plan.apply)
    suspended = one_pass(make_job(suspend=True), plan.status).status
    assert suspended.certificates_until == ""
    resumed = one_pass(encrypted, suspended).status
    assert one_pass(encrypted, resumed).issues_certificates  # a lost Secret is made again


def test_a_broker_that_the_operator_does_not_run_is_refused() -> None:
    with pytest.raises(SpecError, match=r"spec\.security\.tls"):
        make_job(nats={"url": "nats://elsewhere:4222"})


def tls_secrets(namespace: Namespace) -> dict[str, dict[str, Any]]:
    secrets = namespace.list("secrets").values()
    label = "persia.com/role"
    return {s["metadata"]["labels"][label]: s for s in secrets if s["type"] == "kubernetes.io/tls"}


def test_the_operator_makes_renews_and_deletes_the_secrets(
    namespace: Namespace, kubelet: FakeKubelet, operator: OperatorProcess
) -> None:
    namespace.apply(job_manifest(**TLS))
    namespace.await_phase("job", "Running")
    first = tls_secrets(namespace)
    assert set(first) == ROLES
    for name, pod in namespace.list("pods").items():
        role = pod["metadata"]["labels"]["persia.com/role"]
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "persia-tls")
        assert volume["secret"]["secretName"] == first[role]["metadata"]["name"], name
        (mount,) = (m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == "persia-tls")
        assert mount["readOnly"] is True
        env = {v["name"]: v.get("value") for v in pod["spec"]["containers"][0]["env"]}
        assert env["PERSIA_TLS_DIR"] == mount["mountPath"]
    pods = {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}
    operator.stop()
    namespace.expire_certificates("job")
    operator.start()  # one that was away finds it out

    old = {role: secret["data"]["tls.crt"] for role, secret in first.items()}

    def renewed() -> dict[str, dict[str, Any]] | None:
        found = tls_secrets(namespace)
        new = {role: secret["data"]["tls.crt"] for role, secret in found.items()}
        return found if set(new) == ROLES and not set(new.values()) & set(old.values()) else None

    for role, secret in namespace.await_(renewed, "all certificates are new").items():
        # The same object: at no moment was there none.
        assert secret["metadata"]["uid"] == first[role]["metadata"]["uid"], role
    assert {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()} == pods
    assert namespace.await_event("job", "CertificatesRenewed")
    month = (datetime.now(timezone.utc) + timedelta(days=29)).isoformat()
    namespace.await_(lambda: namespace.status("job")["certificatesUntil"] > month, "the status says so")
    namespace.delete("persiajobs", "job")
    namespace.await_(lambda: not tls_secrets(namespace), "the secrets are gone with their job")


@pytest.fixture(params=[OPERATOR])
def cluster(
    control_plane: ControlPlane, kube: Kube, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """With the rights of the operator, or of the user that a test names."""
    # The client library reads KUBECONFIG when it is imported.
    path = str(control_plane.kubeconfig(request.param))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", path)
    connected = Cluster()
    yield connected
    connected._folder.cleanup()  # the process of an operator does so at its end


def test_a_secret_is_replaced_also_if_it_is_missing_or_being_deleted(
    namespace: Namespace, cluster: Cluster
) -> None:
    def content() -> str:
        found = namespace.get("secrets", "s")
        assert found is not None
        assert "deletionTimestamp" not in found["metadata"]
        return base64.b64decode(found["data"]["text"]).decode()

    def replace_by(text: str) -> None:
        metadata = {"namespace": namespace.name, "name": "s"}
        data = {"text": base64.b64encode(text.encode()).decode()}
        cluster.secrets.replace({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})

    for text in ("first", "second"):
        replace_by(text)
        assert content() == text
    namespace.patch("secrets", "s", {"metadata": {"finalizers": ["test/hold"]}})
    namespace.delete("secrets", "s")
    replace_by("third")
    assert content() == "third"
    namespace.patch("secrets", "s", {"immutable": True})
    with pytest.raises(ClusterError, match=r"replacing Secret .*immutable"):
        replace_by("fourth")  # and the status does not say that certificates were renewed


def test_the_right_to_replace_secrets_reads_none(
    namespace: Namespace, kube: Kube, control_plane: ControlPlane
) -> None:
    metadata = {"namespace": namespace.name, "name": "s"}
    bare = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
    kube.create({**bare, "data": {"text": "AAAA"}})
    operator = Kube(control_plane.url, OPERATOR, control_plane.authority)
    status, answer = operator.request("PUT", f"{namespace.path('secrets', 's')}?dryRun=All", bare)
    operator.close()
    assert status == 200
    assert "AAAA" not in str(answer)
    stored = namespace.get("secrets", "s")
    assert stored is not None
    assert stored["data"] == {"text": "AAAA"}


@pytest.mark.parametrize("cluster", [ADMIN], indirect=True)  # the operator may read a single one
def test_a_master_secret_is_made_once_and_one_of_a_wrong_size_is_named(
    namespace: Namespace, kube: Kube, cluster: Cluster
) -> None:
    place = {"namespace": namespace.name, "name": "master"}
    made = cluster.secrets.master(**place)
    assert len(made) == 32
    assert cluster.secrets.master(**place) == made
    namespace.delete("secrets", "master")
    kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": place, "data": {"master": "AAAA"}})
    with pytest.raises(ClusterError, match="has 3 bytes instead of 32"):
        cluster.secrets.master(**place)
