"""From a checkpoint to predictions: the predictor, and the servers in front of it. docs/serving.md."""

from __future__ import annotations

from persia.serving.embeddings import EmbeddedRows, EmbeddingSource, RemoteRows
from persia.serving.predictor import Predictor
from persia.serving.scripts import load_script

__all__ = ["EmbeddedRows", "EmbeddingSource", "Predictor", "RemoteRows", "load_script"]
