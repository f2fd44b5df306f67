"""One version of a served model, and how it is loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from persia.checkpoint.checkpoints import Source
from persia.config import SlotsConfig
from persia.embedding.data import PersiaBatch
from persia.errors import UnavailableError
from persia.packets.follower import FollowOptions
from persia.serving.embeddings import EmbeddedRows, EmbeddingSource
from persia.serving.predictor import Predictor, load_script
from persia.storage.location import Location
from persia.storage.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is served."""

    name: str
    location: Location  # a checkpoint, or a directory of checkpoints with its `latest`
    slots: SlotsConfig | None = None  # of rows that are loaded into this process
    embeddings: EmbeddingSource | None = None  # remote rows; None: those of the checkpoint, with `slots`
    device: torch.device | None = None
    sample: bytes | None = None  # a batch that a version must answer before it is used
    poll_s: float = 1.0  # between two looks for a new version
    follow: FollowOptions | None = None  # packets to apply between checkpoints
    servers: Sequence[str] = ()  # of remote rows: "host:port" of the status of each parameter server


@dataclass(frozen=True)
class Version:
    """A model with its rows."""

    name: str
    digest: str  # of the manifest it was loaded from
    predictor: Predictor


def load_version(
    settings: ModelSettings,
    source: Source,
    load_model: Callable[[Source], torch.nn.Module] = load_script,
) -> Version:
    """Beside whatever answers now, and tried on the sample. Raises what is wrong with it."""
    # Read before and after: a dump to the same directory replaces the manifest last.
    digest = digest_of(source.location)
    model = load_model(source)
    predictor = Predictor(model, embeddings_of(settings, source), device=settings.device)
    try_sample(settings, predictor)
    if digest_of(source.location) != digest:  # else rows and model could be of different dumps
        raise UnavailableError(f"{source.location} was replaced while it was read: load it again")
    step, dump_ids = source.manifest.step, source.manifest.dump_ids
    # Checkpoints of `dump_embedding` in an evaluation have no step; their dumps have names that sort by time.
    name = str(step) if step is not None else max(dump_ids, default="unknown")
    return Version(name, digest, predictor)


def embeddings_of(settings: ModelSettings, source: Source | None) -> EmbeddingSource:
    """The remote ones, or rows of the checkpoint in this process; `source` None: none yet."""
    if settings.embeddings is not None:
        return settings.embeddings
    assert settings.slots is not None, "ServedModel has checked it"
    return EmbeddedRows(source, settings.slots)


def try_sample(settings: ModelSettings, predictor: Predictor) -> None:
    """Raises what a prediction of the sample raises."""
    if settings.sample is not None:
        predictor.predict(PersiaBatch.from_bytes(settings.sample))


def digest_of(checkpoint: Location) -> str:
    return Manifest.read(checkpoint)[1]
