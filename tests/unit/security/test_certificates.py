"""The CA and certificates that `persia-launcher certificates create` writes, used by Python's TLS."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from persia.errors import ConfigError, FailedPreconditionError, InvalidArgumentError
from persia.launcher import cli
from persia.launcher.secret import ROLES
from persia.security import certificates
from persia.security.tls import TlsFiles


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["certificates", "create", *map(str, arguments)])


def certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[bytes | None, bytes | None]:
    """The certificates that server and client have seen. ssl.SSLError: one of them refused the other's."""
    near, far = socket.socketpair()
    near.settimeout(60)
    far.settimeout(60)
    seen: list[bytes | None] = []
    errors: list[Exception] = []

    def serve() -> None:
        try:
            with server.wrap_socket(near, server_side=True) as connection:
                seen.append(connection.getpeercert(binary_form=True))
                connection.sendall(b"x")
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(far) as connection:
            assert connection.recv(1) == b"x"
            assert connection.version() == "TLSv1.3"
            return seen[0], connection.getpeercert(binary_form=True)
    finally:
        thread.join()
        near.close()
        if errors:
            raise errors[0]


def test_a_ca_and_a_certificate_for_each_role(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    result = run(folder, "--days", 30, "--host", "ads.example", "--host", "10.1.2.3")
    assert result.exit_code == 0, result.output
    assert result.output.split() == [str(folder / role) for role in ROLES]
    modes = {path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    assert modes["ca.key"] == modes["trainer/tls.key"] == 0o600
    assert modes["trainer"] == 0o700
    assert not any(name.startswith(".") or "/." in name for name in modes)  # no half-written file
    made = certificate(folder / "loader")
    left = made.not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc)
    assert datetime.timedelta(days=29) < left <= datetime.timedelta(days=30)
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"persia", "localhost", "ads.example"} == set(names.get_values_for_type(x509.DNSName))
    assert {"127.0.0.1", "10.1.2.3"} == {str(a) for a in names.get_values_for_type(x509.IPAddress)}
    server, client = (TlsFiles.of_folder(folder / role) for role in ("server", "worker"))
    shown_by_client, shown_by_server = handshake(server.server_context(), client.client_context())
    assert x509.load_der_x509_certificate(shown_by_client or b"") == certificate(folder / "worker")
    assert x509.load_der_x509_certificate(shown_by_server or b"") == certificate(folder / "server")


def test_strict_clients_accept_the_chain(tmp_path: Path) -> None:
    """Python 3.13 checks extensions of RFC 5280 by default; a name is compared here as well."""
    (folder,) = certificates.create(tmp_path, ["server"], days=1)
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", None)
    near, far = socket.socketpair()
    thread = threading.Thread(
        target=lambda: files.server_context().wrap_socket(near, server_side=True).close()
    )
    thread.start()
    with client.wrap_socket(far, server_hostname=certificates.SERVER_NAME) as connection:
        assert connection.getpeercert()
    thread.join()


def test_nothing_is_overwritten_unless_told(tmp_path: Path) -> None:
    assert run(tmp_path, "--role", "job").exit_code == 0
    authority, before = (tmp_path / "ca.crt").read_bytes(), (tmp_path / "job/tls.key").read_bytes()
    refused = run(tmp_path, "--role", "loader", "--role", "job")
    assert refused.exit_code == 1
    assert "--replace" in refused.output
    assert not (tmp_path / "loader").exists()  # nothing is half done
    assert (tmp_path / "job/tls.key").read_bytes() == before
    assert run(tmp_path, "--role", "loader").exit_code == 0  # a further role, by the same CA
    assert run(tmp_path, "--role", "job", "--replace").exit_code == 0
    assert (tmp_path / "job/tls.key").read_bytes() != before
    assert (tmp_path / "ca.crt").read_bytes() == authority
    handshake(
        TlsFiles.of_folder(tmp_path / "job").server_context(),
        TlsFiles.of_folder(tmp_path / "loader").client_context(),
    )


def test_a_ca_that_cannot_sign(tmp_path: Path) -> None:
    certificates.create(tmp_path / "a", ["job"], days=1)
    certificates.create(tmp_path / "b", ["job"], days=1)
    with pytest.raises(InvalidArgumentError, match="--days 4000: the CA itself ends"):
        certificates.create(tmp_path / "a", ["loader"], days=4000)
    (tmp_path / "a/ca.key").write_bytes((tmp_path / "b/ca.key").read_bytes())
    with pytest.raises(ConfigError, match="is not the key of"):
        certificates.create(tmp_path / "a", ["loader"], days=1)
    (tmp_path / "a/ca.key").unlink()
    with pytest.raises(FailedPreconditionError, match=r"ca\.key is missing"):
        certificates.create(tmp_path / "a", ["loader"], days=1)
    (tmp_path / "b/ca.key").write_text("no key")
    with pytest.raises(ConfigError, match="no PEM file"):
        certificates.create(tmp_path / "b", ["loader"], days=1)
    with pytest.raises(InvalidArgumentError, match="--host 'ä'"):
        certificates.create(tmp_path / "c", ["loader"], days=1, hosts=["ä"])


@pytest.mark.parametrize(("days", "host"), [(3_000_000, "a"), (10**12, "a"), (3651, "a"), (1, "ä")])
def test_a_certificate_that_cannot_be_made_leaves_no_ca(tmp_path: Path, days: int, host: str) -> None:
    result = run(tmp_path / "new", "--days", days, "--host", host)
    assert result.exit_code == 1
    assert "--days" in result.output or "--host" in result.output
    assert not (tmp_path / "new").exists()


def test_another_ca_is_refused_by_both_ends(tmp_path: Path) -> None:
    (own,) = certificates.create(tmp_path / "own", ["job"], days=1)
    (foreign,) = certificates.create(tmp_path / "foreign", ["job"], days=1)
    ours, theirs = TlsFiles.of_folder(own), TlsFiles.of_folder(foreign)
    with pytest.raises(ssl.SSLError):
        handshake(ours.server_context(), theirs.client_context())
    with pytest.raises(ssl.SSLError):
        handshake(theirs.server_context(), ours.client_context())
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="did not return a certificate"):
        handshake(ours.server_context(), anonymous)


def test_new_files_are_used_by_new_connections(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    (folder,) = certificates.create(tmp_path / "a", ["job"], days=1)
    files = TlsFiles.of_folder(folder)
    listener = files.server_context()  # stays the same object, as in a server
    first, _ = handshake(listener, files.client_context())
    certificates.create(tmp_path / "a", ["job"], days=2, replace=True)
    second = handshake(listener, files.client_context())
    assert second[0] == second[1] != first
    # Another CA, as after a loss of its key.
    (other,) = certificates.create(tmp_path / "b", ["job"], days=1)
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (folder / name).write_bytes((other / name).read_bytes())
    third = handshake(listener, TlsFiles.of_folder(other).client_context())
    assert third[0] == third[1] != second[0]
    # A key that does not match yet: the pair read before is used, and one warning says so.
    (folder / "tls.key").write_bytes((tmp_path / "a/ca.key").read_bytes())
    assert handshake(listener, files.client_context()) == third
    assert log.text.count("the certificate read before is used") == 1


def test_a_listener_starts_while_its_files_are_replaced(tmp_path: Path) -> None:
    (folder,) = certificates.create(tmp_path, ["job"], days=1)
    files = TlsFiles.of_folder(folder)
    client, key = files.client_context(), (folder / "tls.key").read_bytes()
    (folder / "tls.key").write_text("half of a key")
    listener = files.server_context()
    first = handshake(listener, client)
    (folder / "tls.key").write_bytes(key)
    assert handshake(listener, client) == first


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls\.crt.*persia-launcher certificates create"):
        TlsFiles.of_folder(tmp_path)
