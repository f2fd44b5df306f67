"""TorchScript is code: of whom it is run, and of whom it is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.config import parse_embedding_config
from persia.errors import UntrustedError
from persia.serving import load_script
from persia.serving.following import DenseModels
from persia.serving.predictor import ModelSettings
from persia.serving.versions import ServedModel
from persia.storage.location import Location
from persia.storage.signing import create_key
from tests.packet_trainer import SLOTS, PacketTrainer, script

NAME = "jit_dense.pt"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    Checkpoints(lambda: (), deadline_s=5).dump(
        DumpRequest(tmp_path / "model", dense={NAME: script(2.0)}, embeddings=False, step=1)
    )
    return tmp_path / "model"


def by_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of `folder` are another user's than the one who reads them."""
    if os.geteuid() == 0:
        for path in folder.rglob(NAME):
            os.chown(path, 54321, 54321)
    else:  # who may give no file away is told to be somebody else
        monkeypatch.setattr(os, "geteuid", lambda: 54321)


def writable_by_all(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    for path in folder.rglob(NAME):
        path.chmod(0o666)


Opened = Callable[[Path, pytest.MonkeyPatch], None]
strangers = pytest.mark.parametrize("opened", [by_another_user, writable_by_all])


def test_code_of_the_own_user_runs(model: Path) -> None:
    assert load_script(Source(model)) is not None


@strangers
def test_code_of_another_user_is_refused(
    opened: Opened, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(model, monkeypatch)
    refused = rf"{NAME} is code, is not signed, .*--verify-key .*--trust-scripts"
    with pytest.raises(UntrustedError, match=refused):
        load_script(Source(model))
    with pytest.raises(UntrustedError, match=refused):
        ServedModel(ModelSettings(name="m", location=Location.of(model), slots=parse_embedding_config(SLOTS)))
    with pytest.raises(UntrustedError, match=refused):
        DenseModels(Location.of(model)).of_checkpoint(Source(model))
    monkeypatch.setenv("PERSIA_TRUST_SCRIPTS", "1")
    assert load_script(Source(model)) is not None


@strangers
def test_code_of_a_packet_is_refused_alike(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = PacketTrainer(tmp_path / "packets")
    trainer.trained(1)
    packet = trainer.last
    models = DenseModels(Location.of(tmp_path / "model"))
    assert models.of_packet(trainer.log, packet) is not None
    opened(tmp_path / "packets", monkeypatch)
    with pytest.raises(UntrustedError, match=f"{NAME} is code"):
        models.of_packet(trainer.log, packet)


def test_signed_code_runs_whoever_owns_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    private, public = create_key(tmp_path / "job.key")
    monkeypatch.setenv("PERSIA_SIGN_KEY", str(private))
    monkeypatch.setenv("PERSIA_VERIFY_KEY", str(public))
    signed = tmp_path / "signed"
    Checkpoints(lambda: (), deadline_s=5).dump(
        DumpRequest(signed, dense={NAME: script(2.0)}, embeddings=False, step=1)
    )
    by_another_user(signed, monkeypatch)
    assert load_script(Source(signed)) is not None
    with pytest.raises(UntrustedError, match="is not signed, and must be by"):
        load_script(Source(model))
    # And the trust in scripts replaces no signature.
    monkeypatch.setenv("PERSIA_TRUST_SCRIPTS", "1")
    with pytest.raises(UntrustedError, match="is not signed, and must be by"):
        load_script(Source(model))
