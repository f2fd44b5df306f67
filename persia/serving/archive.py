"""Archives for TorchServe (.mar): which checkpoint to serve, and where its rows come from.

A few kilobytes: an archive names one checkpoint and the digest of its manifest, and the handler loads model
and rows from there. So a version stays what it was when it was archived, or is refused; rolling back to one
needs its checkpoint to be kept.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import Self

from persia.checkpoint.checkpoints import Source
from persia.config import load_embedding_config
from persia.errors import ConfigError, FailedPreconditionError, InvalidArgumentError, StorageError
from persia.serving.scripts import load_script
from persia.storage.manifest import Manifest, utc_now

SLOTS_NAME = "embedding_config.yml"

_HANDLER = "persia.serving.torchserve"  # a module of this package: TorchServe imports it by name
_CONFIG_NAME = "model-config.yaml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class ArchiveSettings:
    """What the handler needs: the section "persia" of an archive's model-config.yaml."""

    checkpoint: str  # a directory or URL, as TorchServe's machine sees it
    manifest: str  # digest of the checkpoint's manifest
    embedding_workers: list[str]  # "host:port" each; none: rows are loaded from the checkpoint
    timeout_s: float = 10.0  # of one lookup at the embedding workers

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Self:
        """From the whole model-config.yaml. ConfigError: what is wrong with it."""
        section = (config or {}).get("persia")
        names = {field.name for field in fields(cls)}
        # Unknown keys too: an archive of a newer version may ask for what this one would leave out.
        if not isinstance(section, dict) or set(section) != names:
            raise ConfigError(
                f"{_CONFIG_NAME} of the archive needs a section 'persia' with {', '.join(sorted(names))}, "
                f"and has {section!r}: write the archive with persia-launcher torchserve-archive"
            )
        return cls(**section)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """TorchServe's own settings of a model, under its names."""

    minWorkers: int = 1  # noqa: N815 - processes; each holds the rows, where they are loaded
    maxWorkers: int = 1  # noqa: N815
    batchSize: int = 1  # noqa: N815 - requests computed at once
    maxBatchDelay: int = 10  # noqa: N815 - ms; with a batchSize of 1 nothing waits
    responseTimeout: int = 120  # noqa: N815 - seconds, for loading a version as well


def write_archive(
    directory: Path,
    name: str,
    checkpoint: str,
    *,
    version: str | None = None,
    embedding_config: str | None = None,
    embedding_workers: Sequence[str] = (),
    workers: WorkerSettings = WorkerSettings(),
) -> Path:
    """Writes `name`-`version`.mar; its path. `version` None: the checkpoint's training step.

    Raises what is wrong with checkpoint or config; FailedPreconditionError: that archive is there already.
    """
    source = Source(checkpoint)
    # The handler compares it: an archive must not serve a checkpoint that was written later to that place.
    digest = Manifest.read(source.location)[1]
    # Fails here, where it can be mended, and not in TorchServe's log.
    load_script(source)
    if version is None and source.manifest.step is None:
        raise InvalidArgumentError(f"{source.location} does not tell its training step: give --version")
    version = version or str(source.manifest.step)
    for what, text in (("--model-name", name), ("--version", version)):
        check_name(what, text)
    settings = ArchiveSettings(
        checkpoint=str(source.location), manifest=digest, embedding_workers=list(embedding_workers)
    )
    config = {**asdict(workers), "persia": asdict(settings)}
    content = {
        "MAR-INF/MANIFEST.json": json.dumps(_manifest(name, version), indent=2),
        _CONFIG_NAME: yaml.safe_dump(config, sort_keys=False),
    }
    if not embedding_workers:
        content[SLOTS_NAME] = _checked_slots(embedding_config, source)
    return _write(directory / f"{name}-{version}.mar", content)


def check_name(option: str, text: str) -> None:
    """InvalidArgumentError: `text` cannot be part of URLs and names of files."""
    if not _NAME.fullmatch(text):
        raise InvalidArgumentError(f"{option} {text!r}: use letters, digits, '_', '.' and '-'")


def _checked_slots(embedding_config: str | None, source: Source) -> str:
    if embedding_config is None:
        raise FailedPreconditionError(
            "TorchServe's processes load the rows and need their slots: give --embedding-config, or "
            "--embedding-worker for rows that servers hold"
        )
    if not source.has_embeddings:
        raise FailedPreconditionError(f"{source.location} has no embeddings: archive a whole checkpoint")
    load_embedding_config(embedding_config)
    return Path(embedding_config).read_text(encoding="utf-8")


def _manifest(name: str, version: str) -> dict[str, Any]:
    """TorchServe's description of an archive."""
    model = {
        "modelName": name,
        "modelVersion": version,
        "handler": _HANDLER,
        "configFile": _CONFIG_NAME,
    }
    # The version is that of torch-model-archiver whose layout this is.
    return {"createdOn": utc_now(), "runtime": "python", "model": model, "archiverVersion": "0.12.0"}


def _write(path: Path, content: Mapping[str, str]) -> Path:
    """Whole or not at all, as TorchServe may read the folder at any time."""
    # TorchServe identifies a version by its name, and would keep serving the one that it has loaded.
    if path.exists():
        raise FailedPreconditionError(
            f"{path} exists: a version never changes once archived; give another --version, or remove it"
        )
    # In the same folder, so that the rename is atomic.
    unfinished = path.with_suffix(".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in content.items():
                archive.writestr(name, text)
        os.replace(unfinished, path)
    except OSError as failure:
        unfinished.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {failure}") from failure
    return path
