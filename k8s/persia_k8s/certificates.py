"""Certificates of a job: one Secret for each role, signed by a CA that only this job has.

The CA's key is derived from the operator's master secret and the job's uid, so the operator stores none. The
certificates are those of `persia-launcher certificates create` (docs/security.md).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from persia_k8s.builders.manifest import Manifest, labels, object_metadata
from persia_k8s.job import Job
from persia_k8s.names import CLIENT, ROLE_LABEL, Role, object_name, tls_name
from persia_k8s.reconcile import parse_time

_CA_LIFETIME = timedelta(days=3650)
_CLOCKS_DIFFER = timedelta(minutes=5)
# The order of P-256: a key is a number from 1 to it (FIPS 186-5, A.2.1).
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_NO_USAGE: Mapping[str, bool] = dict.fromkeys(
    (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    ),
    False,
)


def certificate_secrets(job: Job, master: bytes, now: datetime, until: datetime) -> list[Manifest]:
    """Secrets with new keys and certificates, valid until `until`: one for each role, one for clients.

    `master`: 32 bytes.
    """
    key = _authority_key(master, job)
    begin = parse_time(job.created) if job.created else now
    # The same in each renewal, but for its signature: certificates of before and after trust each other.
    name = _name(f"persia job {job.uid}")
    serial = int.from_bytes(hashlib.sha256(job.uid.encode()).digest()[:16], "big") or 1
    builder = _builder(name, name, key.public_key(), key, begin, begin + _CA_LIFETIME, serial)
    builder = builder.add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    authority = builder.sign(key, hashes.SHA256())
    own_roles = [*([Role.NATS] if job.has_own_nats else []), *job.roles]
    roles = own_roles if job.is_inference else [*own_roles, Role.ROWS]
    return [_secret(job, role, key, authority, now, until) for role in (*roles, None)]


def _secret(
    job: Job,
    role: Role | None,
    ca_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    now: datetime,
    until: datetime,
) -> Manifest:
    """`role` None: for clients of the job."""
    suffix = CLIENT if role is None else role.suffix
    key = ec.generate_private_key(ec.SECP256R1())
    subject, serial = _name(f"persia {suffix}"), x509.random_serial_number()
    builder = _builder(subject, authority.subject, key.public_key(), ca_key, now, until, serial)
    service = "" if role is None else object_name(job.name, role)
    hosts = [service, f"{service}.{job.namespace}", f"{service}.{job.namespace}.svc"] if service else []
    # Every certificate of persia has the name `persia`, for clients that compare names.
    names = [x509.DNSName(host) for host in ("persia", "localhost", *hosts)]
    certificate = (
        builder.add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .sign(ca_key, hashes.SHA256())
    )
    files = {
        "ca.crt": authority.public_bytes(Encoding.PEM),
        "tls.crt": certificate.public_bytes(Encoding.PEM),
        "tls.key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    its_labels = {**labels(job, None), ROLE_LABEL: suffix}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_metadata(job, tls_name(job.name, job.uid, suffix), its_labels),
        "type": "kubernetes.io/tls",
        "data": {file: base64.b64encode(content).decode() for file, content in files.items()},
    }


def _authority_key(master: bytes, job: Job) -> ec.EllipticCurvePrivateKey:
    derivation = HKDF(hashes.SHA256(), length=48, salt=None, info=f"persia/1/ca/{job.uid}".encode())
    number = int.from_bytes(derivation.derive(master), "big")
    return ec.derive_private_key(number % (_ORDER - 1) + 1, ec.SECP256R1())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
    serial: int,
) -> x509.CertificateBuilder:
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
        .serial_number(serial)
        .not_valid_before(begin - _CLOCKS_DIFFER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(issuer_id, critical=False)
    )


def _usage(*names: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{**_NO_USAGE, **dict.fromkeys(names, True)})


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
