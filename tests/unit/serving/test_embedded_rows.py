"""Rows of a checkpoint in a process that serves: all of them, whatever limits the servers that train have."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np

from persia._native import EmbeddedClient, TrainConfig
from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import LocalPeer
from persia.checkpoint.server_job import ServerShare
from persia.checkpoint.service import CheckpointService
from persia.config import SlotsConfig, parse_embedding_config
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.pipeline.slot_rows import slot_signs
from persia.serving.embeddings import EmbeddedRows
from persia.storage.schema import RowSchema

NUM_IDS = 2000


def write_checkpoint(slots: SlotsConfig, directory: Path) -> int:
    """Of a store with other shards than one that serves; how many rows its limits have left it."""
    store = EmbeddedClient(
        slots=slots.native_slots(),
        feature_index_prefix_bit=slots.feature_index_prefix_bit,
        num_internal_shards=4,
    )
    store.configure(TrainConfig(optimizer="adagrad", lr=0.1))
    signs = slot_signs(slots, "user", np.arange(NUM_IDS, dtype=np.uint64))
    store.set_embeddings(signs, np.ones((NUM_IDS, 2), np.float32))
    share = ServerShare(store=store.store, index=0, replicas=1, schema=RowSchema.of(slots), num_threads=2)
    peer = LocalPeer(CheckpointService(share))
    Checkpoints(lambda: [peer], deadline_s=30).dump(DumpRequest(directory, step=1))
    return sum(store.sizes())


def test_rows_of_a_slot_with_a_capacity_are_all_served(tmp_path: Path) -> None:
    for capacity in (12, 1000):  # below the shards of the store that serves, and above
        slots = parse_embedding_config({"slots_config": {"user": {"dim": 2, "capacity": capacity}}})
        directory = tmp_path / str(capacity)
        num_rows = write_checkpoint(slots, directory)
        assert 0 < num_rows <= capacity
        rows = EmbeddedRows(Source(directory), slots)
        batch = PersiaBatch(
            [IDTypeFeatureWithSingleID("user", np.arange(NUM_IDS, dtype=np.uint64))], requires_grad=False
        )
        rows.lookup(batch.encode_id_features())
        assert rows.num_missing == NUM_IDS - num_rows


def test_rows_that_are_not_served_any_more_are_gone_at_once(tmp_path: Path) -> None:
    slots = parse_embedding_config({"slots_config": {"user": {"dim": 2}}})
    write_checkpoint(slots, tmp_path)
    gc.collect()
    gc.disable()  # a version is replaced long before the collector comes
    try:
        rows = EmbeddedRows(Source(tmp_path), slots)
        store = weakref.ref(rows._client)
        del rows
        assert store() is None
    finally:
        gc.enable()
