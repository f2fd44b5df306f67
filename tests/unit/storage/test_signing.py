"""Signed checkpoints and packets: what a stranger changes, adds or exchanges on the storage is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from persia.checkpoint.checkpoints import DumpRequest, Source
from persia.errors import (
    ConfigError,
    CorruptionError,
    FailedPreconditionError,
    NotFoundError,
    PersiaError,
    UntrustedError,
)
from persia.rows.reader import check_files
from persia.storage.location import Location
from persia.storage.manifest import Manifest
from persia.storage.pages import PagedFile, PageHasher
from persia.storage.signing import Signer, create_key, signer, trusted_keys
from tests.unit.checkpoint.conftest import (
    checkpoints_of,
    make_bags,
    make_server,
    rows_of,
    sealed,
    shard_files,
    train,
    without_ages,
)

FILES = {"dense.pt": b"dense", "opt.pt": b"optimizer", "jit_dense.pt": b"code"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys and a checkpoint, dumped once: each test changes a copy."""
    place = tmp_path_factory.mktemp("signed")
    private, public = create_key(place / "job.key")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERSIA_SIGN_KEY", str(private))
        patch.setenv("PERSIA_VERIFY_KEY", str(public))
        bags = make_bags()
        train(bags, num_ids=1000, steps=1)
        checkpoints_of(bags).dump(DumpRequest(place / "signed", dense=FILES, step=5))
    return place


@pytest.fixture
def keys(template: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    files = str(template / "job.key"), str(template / "job.key.pub")
    monkeypatch.setenv("PERSIA_SIGN_KEY", files[0])
    monkeypatch.setenv("PERSIA_VERIFY_KEY", files[1])
    return files


@pytest.fixture
def signed(template: Path, tmp_path: Path, keys: tuple[str, str]) -> Path:
    return Path(shutil.copytree(template / "signed", tmp_path / "signed"))


def test_a_signed_checkpoint_loads_on_any_number_of_servers(signed: Path) -> None:
    manifest, _ = Manifest.read(Location.of(signed))
    assert manifest.embeddings is not None
    assert {file.pages is None for file in manifest.embeddings.files} == {False}
    servers = checkpoints_of(*(make_server(index, 3) for index in range(3)))
    servers.load(Source(signed))
    servers.dump(DumpRequest(signed.parent / "again"))
    before, after = rows_of(signed), rows_of(signed.parent / "again")
    assert len(before) > 1000
    assert (without_ages(before) == without_ages(after)).all()
    assert set(check_files(Location.of(signed), manifest).values()) == {None}


def test_the_next_dump_removes_the_digests_of_the_last(signed: Path) -> None:
    before = set(signed.rglob("*.pages"))
    bags = make_bags()
    train(bags, num_ids=100)
    checkpoints_of(bags).dump(DumpRequest(signed))
    assert before
    assert before.isdisjoint(signed.rglob("*.pages"))


def test_unsigned_is_what_it_was(tmp_path: Path) -> None:
    bags = make_bags()
    train(bags, num_ids=100)
    checkpoints_of(bags).dump(DumpRequest(tmp_path / "c", dense=FILES))
    assert not list(tmp_path.rglob("*.pages"))
    assert "signed_by" not in json.loads((tmp_path / "c" / "manifest.json").read_bytes())


def test_a_reader_without_keys_loads_what_is_signed(signed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_VERIFY_KEY")
    assert Source(signed).dense("opt.pt") == b"optimizer"
    assert len(rows_of(signed)) > 1000


def unsign(signed: Path) -> None:
    path = signed / "manifest.json"
    values = json.loads(path.read_bytes())
    del values["signed_by"], values["checksum"]
    path.write_bytes(sealed(values))


def resign_with_another_key(signed: Path) -> None:
    manifest, _ = Manifest.read(Location.of(signed))
    stranger = Signer(Ed25519PrivateKey.generate(), "stranger")
    (signed / "manifest.json").write_bytes(manifest.encode(stranger))


def change_under_the_signature(signed: Path) -> None:
    """With a checksum that is right again: only the signature can tell."""
    path = signed / "manifest.json"
    values = json.loads(path.read_bytes().replace(b'"step": 5,', b'"step": 6,'))
    del values["checksum"]
    path.write_bytes(sealed(values))


def claim_the_right_key(signed: Path) -> None:
    """The trusted key's name over the signature of another."""
    honest = json.loads((signed / "manifest.json").read_bytes())["signed_by"].split(":")[1]
    resign_with_another_key(signed)
    path = signed / "manifest.json"
    values = json.loads(path.read_bytes())
    del values["checksum"]
    values["signed_by"] = f"ed25519:{honest}:{values['signed_by'].split(':')[2]}"
    path.write_bytes(sealed(values))


def append_a_key(signed: Path) -> None:
    """JSON takes the last of two equal keys, which stands after the signature."""
    path = signed / "manifest.json"
    body = path.read_bytes()[:-84] + b',\n "step": 6'
    path.write_bytes(body + b',\n "checksum": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode())


@pytest.mark.parametrize(
    "key", ['"step": 6', '"step": 6, "version": 1', '"version": 1, "embeddings": null, "dense": null']
)
def test_keys_in_place_of_the_checksum_are_refused(key: str, signed: Path) -> None:
    """The signature does not cover the checksum: JSON there would replace what is signed."""
    path = signed / "manifest.json"
    path.write_bytes(path.read_bytes()[:-84] + f",{key}".encode().ljust(83) + b"}")
    assert json.loads(path.read_bytes())["signed_by"]
    with pytest.raises(CorruptionError, match=r"manifest\.json is damaged"):
        Manifest.read(Location.of(signed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unsign, r"manifest\.json is not signed, and must be by .*job\.key\.pub .*--sign-key"),
        (resign_with_another_key, r"manifest\.json is signed by the key .*, and must be by .*job\.key\.pub"),
        (change_under_the_signature, r"manifest\.json was changed after .*job\.key\.pub .* signed it"),
        (claim_the_right_key, r"manifest\.json was changed after .*job\.key\.pub .* signed it"),
        (append_a_key, r"manifest\.json is not signed"),
    ],
)
def test_a_forged_manifest_replaces_nothing(
    change: Callable[[Path], None], message: str, signed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bags = make_bags()
    train(bags, num_ids=100, seed=7)
    checkpoints_of(bags).dump(DumpRequest(signed.parent / "before"))
    change(signed)
    with pytest.raises(UntrustedError, match=message):
        checkpoints_of(bags).load(Source(signed))
    with pytest.raises(UntrustedError, match=message):
        Source(signed).dense("dense.pt")
    checkpoints_of(bags).dump(DumpRequest(signed.parent / "after"))
    assert (rows_of(signed.parent / "before") == rows_of(signed.parent / "after")).all()
    # What makes the difference is the key: who checks no signature loads it.
    monkeypatch.delenv("PERSIA_VERIFY_KEY")
    assert Source(signed).dense("dense.pt") == b"dense"


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_changed_row_is_refused_by_its_page(signed: Path, num_servers: int) -> None:
    """Before the checksum of its block is asked, which is XXH3: a stranger can find other bytes with it."""
    path = shard_files(signed)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    servers = checkpoints_of(*(make_server(index, num_servers) for index in range(num_servers)))
    with pytest.raises(CorruptionError, match="they are not those that were signed"):
        servers.load(Source(signed))
    manifest, _ = Manifest.read(Location.of(signed))
    assert sum(error is not None for error in check_files(Location.of(signed), manifest).values()) == 1


@pytest.mark.parametrize("name", list(FILES))
def test_every_torch_file_is_covered(signed: Path, name: str) -> None:
    (path,) = signed.glob(f"dump-*/{name}")
    path.write_bytes(bytes(len(FILES[name])))
    with pytest.raises(CorruptionError, match=f"{name} is damaged"):
        Source(signed).dense(name)


def test_a_torch_file_that_no_manifest_names_is_refused(signed: Path, tmp_path: Path) -> None:
    (signed / "extra.pt").write_bytes(b"code")
    with pytest.raises(UntrustedError, match=r"extra\.pt is named by no manifest .*job\.key\.pub"):
        Source(signed).dense("extra.pt")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "dense.pt").write_bytes(b"weights")
    with pytest.raises(UntrustedError, match=r"dense\.pt is named by no manifest"):
        Source(tmp_path / "plain").dense("dense.pt")
    with pytest.raises(NotFoundError):  # a missing file is no forged one
        Source(signed).dense("absent.pt")


def test_digests_of_another_file_are_refused(signed: Path) -> None:
    first, second = sorted(signed.rglob("*.pages"))[:2]
    shutil.copy(second, first)
    second.write_bytes(second.read_bytes()[:-32])
    with pytest.raises(CorruptionError, match="is damaged or replaced"):
        rows_of(signed)


def test_a_dump_signs_no_part_that_a_stranger_wrote(signed: Path) -> None:
    unsign(signed)
    bags = make_bags()
    train(bags, num_ids=100)
    with pytest.raises(FailedPreconditionError, match="is not signed, .*dump to another directory"):
        checkpoints_of(bags).dump(DumpRequest(signed))
    with pytest.raises(UntrustedError):
        Source(signed)
    checkpoints_of(bags).dump(DumpRequest(signed, dense=FILES))  # of both parts nothing of it stays
    assert Source(signed).dense("dense.pt") == b"dense"


def test_a_new_key_is_taken_up_beside_the_old_one(
    signed: Path, keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = create_key(signed.parent / "next.key")
    monkeypatch.setenv("PERSIA_VERIFY_KEY", str(public))
    with pytest.raises(UntrustedError):
        Source(signed)
    monkeypatch.setenv("PERSIA_VERIFY_KEY", f"{public}:{keys[1]}")
    assert Source(signed).manifest.step == 5
    monkeypatch.setenv("PERSIA_SIGN_KEY", str(private))
    bags = make_bags()
    train(bags, num_ids=100)
    checkpoints_of(bags).dump(DumpRequest(signed.parent / "new", dense=FILES))
    monkeypatch.setenv("PERSIA_VERIFY_KEY", str(public))
    assert Source(signed.parent / "new").dense("dense.pt") == b"dense"


def test_keys_are_made_for_their_owner_and_never_replaced(tmp_path: Path) -> None:
    private, public = create_key(tmp_path / "k")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) & 0o600 == 0o600
    assert b"PRIVATE KEY" in private.read_bytes()
    assert b"PUBLIC KEY" in public.read_bytes()
    content = private.read_bytes()
    with pytest.raises(FailedPreconditionError, match="exists"):
        create_key(tmp_path / "k")
    assert private.read_bytes() == content


def test_unusable_keys_name_variable_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = create_key(tmp_path / "k")
    public.chmod(0o644)
    cases: list[tuple[Callable[[], object], str, Path, str]] = [
        (trusted_keys, "PERSIA_VERIFY_KEY", tmp_path / "absent", "cannot be read: No such file"),
        (trusted_keys, "PERSIA_VERIFY_KEY", private, "is no public Ed25519 key"),
        (trusted_keys, "PERSIA_VERIFY_KEY", Path(":"), "names no file"),
        (signer, "PERSIA_SIGN_KEY", tmp_path / "absent", "cannot be read: No such file"),
        (signer, "PERSIA_SIGN_KEY", public, "is open to every user of this machine: chmod 600"),
    ]
    for function, variable, path, message in cases:
        monkeypatch.setenv(variable, str(path))
        with pytest.raises(ConfigError, match=f"{variable}={path} {message}"):
            function()
    public.chmod(0o600)
    with pytest.raises(ConfigError, match="is no private Ed25519 key in PEM"):
        signer()
    with pytest.raises(ConfigError):  # and a dump with such a key leaves no unsigned checkpoint
        checkpoints_of(make_bags()).dump(DumpRequest(tmp_path / "c", dense=FILES, embeddings=False))
    assert not (tmp_path / "c" / "manifest.json").exists()


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 300_000])
def test_pages_check_every_byte_of_any_range(tmp_path: Path, size: int) -> None:
    content = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    (tmp_path / "f").write_bytes(content)
    hasher = PageHasher()
    for start in range(0, size, 70_001):
        hasher.update(content[start : start + 70_001])
    digests = hasher.finish()
    assert len(digests) == -(-size // 65536) * 32
    file = PagedFile(Location.of(tmp_path / "f"), size, digests)
    for start in range(0, size + 1, max(1, size // 7)):
        for end in {start, min(start + 1, size), min(start + 65536, size), size}:
            assert file.read_range(start, end - start) == content[start:end]
    if size:
        (tmp_path / "f").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CorruptionError):
            file.read_range(size - 1, 1)
        (tmp_path / "f").write_bytes(content[:-1])
        with pytest.raises((CorruptionError, PersiaError)):
            file.read_range(0, size)
