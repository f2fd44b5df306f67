"""A CA for one job, and certificates of its roles, as folders for PERSIA_TLS_DIR (docs/security.md).

In: a folder. Out: `ca.key` and `ca.crt` in it, and a folder with `tls.crt`, `tls.key` and `ca.crt` for each
role. Files replace older ones by a rename: a process that reads them meanwhile sees no half of one.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from persia.errors import ConfigError, FailedPreconditionError, InvalidArgumentError, StorageError
from persia.security.tls import CA, CERTIFICATE, KEY

CA_DAYS = 3650
# In every certificate: what clients outside persia compare, such as Prometheus and gRPC.
SERVER_NAME = "persia"
_CLOCKS_DIFFER = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Authority:
    """The CA of a job."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """The CA in `folder`; a new one, not yet saved, if the folder has none.

        ConfigError: its files do not belong together. FailedPreconditionError: one of them is missing.
        """
        key_file, certificate_file = folder / "ca.key", folder / CA
        if not key_file.exists() and not certificate_file.exists():
            return cls._new()
        for file in (key_file, certificate_file):
            if not file.exists():
                raise FailedPreconditionError(
                    f"{file} is missing: put it back to sign with this CA, or make a CA in another folder"
                )
        try:
            key = load_pem_private_key(key_file.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except OSError as error:
            raise StorageError(f"{folder} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{key_file} or {certificate_file} is no PEM file of a CA: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{key_file} is not the key of {certificate_file}: put the right one back")
        return cls(key, certificate)

    @classmethod
    def _new(cls) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        # Two CAs of one name would be taken for one another where both are trusted.
        name = _name(f"persia job {secrets.token_hex(4)}")
        usage = {"key_cert_sign": True, "crl_sign": True}
        builder = _builder(name, name, key.public_key(), key.public_key(), CA_DAYS, usage)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()))

    def save(self, folder: Path) -> None:
        """Writes the key and the certificate into `folder`."""
        _make_folder(folder)
        _write(folder / "ca.key", _pem_of(self.key), 0o600)
        _write(folder / CA, self.certificate.public_bytes(Encoding.PEM), 0o644)

    def check_days(self, days: int) -> None:
        """InvalidArgumentError: a certificate for `days` from now would outlive the CA."""
        end = self.certificate.not_valid_after_utc
        if days > (end - _now()).days:  # not by adding the days: a date has an end
            raise InvalidArgumentError(
                f"--days {days}: the CA itself ends at {end:%Y-%m-%d}: give fewer days, or make a new CA in "
                "another folder"
            )

    def issue(self, folder: Path, role: str, *, days: int, hosts: Sequence[str] = ()) -> None:
        """Writes a new key and certificate for `role` into `folder`, with the CA's certificate.

        `hosts` are more names or addresses to stand in it. InvalidArgumentError: it would outlive the CA.
        """
        self.check_days(days)
        key = ec.generate_private_key(ec.SECP256R1())
        usage = {"digital_signature": True}
        issuer = self.certificate.subject
        public = key.public_key()
        builder = _builder(_name(f"persia {role}"), issuer, public, self.key.public_key(), days, usage)
        names = _general_names(hosts)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                # Embedding workers, for one, are both.
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        _make_folder(folder)
        _write(folder / CA, self.certificate.public_bytes(Encoding.PEM), 0o644)
        _write(folder / KEY, _pem_of(key), 0o600)
        _write(folder / CERTIFICATE, certificate.public_bytes(Encoding.PEM), 0o644)


def create(
    folder: Path, roles: Sequence[str], *, days: int, hosts: Sequence[str] = (), replace: bool = False
) -> list[Path]:
    """Makes certificates for `roles`, and a CA if `folder` has none; the folders of the roles.

    FailedPreconditionError: there are some already, and `replace` is false. The CA is never replaced.
    """
    folders = [folder / role for role in roles]
    existing = [one / file for one in folders for file in (CERTIFICATE, KEY) if (one / file).exists()]
    if existing and not replace:
        raise FailedPreconditionError(
            f"{existing[0]} exists: --replace renews it with the same CA, and running processes use the new "
            "one without a restart"
        )
    authority = Authority.open(folder)
    # Before anything is written: a CA without certificates, or some of them, would be left.
    authority.check_days(days)
    _general_names(hosts)
    if not (folder / CA).exists():
        authority.save(folder)
    for one, role in zip(folders, roles, strict=True):
        authority.issue(one, role, days=days, hosts=hosts)
    return folders


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    days: int,
    usage: dict[str, bool],
) -> x509.CertificateBuilder:
    unused = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _CLOCKS_DIFFER)
        .not_valid_after(_now() + datetime.timedelta(days=days))
        .add_extension(x509.KeyUsage(**{**unused, **usage}), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    every = dict.fromkeys((SERVER_NAME, "localhost", "127.0.0.1", *hosts))
    return [_general_name(host) for host in every]


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise InvalidArgumentError(
            f"--host {host!r} is neither a DNS name nor an address: write international names as xn--…"
        ) from None


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}") from error


def _write(path: Path, content: bytes, mode: int) -> None:
    written = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Never readable by others, not even before a chmod; O_EXCL: it follows no link.
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except OSError as error:
        written.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
