"""Rows of 16 bits in the processes of real servers: the numbers are those of a store in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from persia import _native
from persia.config import parse_embedding_config
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.messaging.discovery import Directory
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.nn import EmbeddingBagCollection
from persia.testing import LocalCluster

DIM, NUM_IDS, STEPS, TIMEOUT_S = 8, 100, 5, 60.0
SLOTS: dict[str, Any] = {"slots_config": {"item": {"dim": DIM}}}
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("name", TYPES)
def test_servers_train_as_an_embedded_store_does(name: str) -> None:
    optimizer, config = Adagrad(lr=0.05), EmbeddingConfig(emb_initialization=(-0.1, 0.1), seed=3)
    slots = parse_embedding_config(SLOTS)
    bags, wide = (
        EmbeddingBagCollection(slots, optimizer, embedding_config=config, row_dtype=dtype)
        for dtype in (name, "float32")
    )
    rng = np.random.default_rng(5)
    with LocalCluster(
        embedding_config=SLOTS,
        global_config={"embedding_parameter_server_config": {"row_dtype": name}},
        parameter_servers=2,
    ) as cluster:
        (worker,) = Directory(cluster.session).wait_for(EMBEDDING_WORKER, TIMEOUT_S)
        cluster.join()
        client = _native.RemoteClient(1)
        client.set_worker(0, worker.address)
        client.configure(optimizer.train_config(config))
        for step in range(STEPS):
            ids = rng.permutation(NUM_IDS).astype(np.uint64)
            message = _native.encode_id_features(
                NUM_IDS, [("item", ids, np.arange(NUM_IDS + 1, dtype=np.uint32))]
            )
            result = client.lookup_direct(0, message, requires_grad=True, timeout_s=TIMEOUT_S)
            rows = torch.from_numpy(result.slots[0].rows.copy())
            gradient = torch.from_numpy(rng.normal(size=(NUM_IDS, DIM)).astype(np.float32))
            of_bags, of_wide = (
                each(torch.from_numpy(ids.astype(np.int64)), torch.ones(1, NUM_IDS, dtype=torch.int64))
                for each in (bags, wide)
            )
            assert torch.equal(rows, of_bags), f"step {step}"
            assert torch.equal(rows, rows.to(TYPES[name]).float()), f"step {step}: more than 16 bits"
            assert not torch.equal(rows, of_wide), f"step {step}"
            # A unit in the last place for each update, of rows below 0.5 (bfloat16).
            torch.testing.assert_close(rows, of_wide, rtol=0, atol=(step + 1) * 2**-9)
            client.return_gradients(result.reference, [("item", gradient.numpy())], timeout_s=TIMEOUT_S)
            of_bags.backward(gradient)
            of_wide.backward(gradient)
