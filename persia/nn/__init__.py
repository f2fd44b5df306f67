"""Modules for ordinary torch models whose embedding rows live in persia's store."""

from persia.nn.convert import convert, slots_for
from persia.nn.early_stopping import EarlyStopping
from persia.nn.embedding_bag_collection import BagStats, EmbeddingBagCollection
from persia.nn.export import export
from persia.nn.metrics import ClickMetrics, ClickQuality
from persia.nn.servers import Servers, job_servers
from persia.nn.store_embedding import StoreEmbedding, StoreEmbeddingBag

__all__ = [
    "BagStats",
    "ClickMetrics",
    "ClickQuality",
    "EarlyStopping",
    "EmbeddingBagCollection",
    "Servers",
    "StoreEmbedding",
    "StoreEmbeddingBag",
    "convert",
    "export",
    "job_servers",
    "slots_for",
]
