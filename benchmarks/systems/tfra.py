"""TensorFlow Recommenders Addons: a dynamic hash table on the CPU, in a TF1-style graph.

Of the peers it is the one that also keeps 64-bit IDs in a growing table. All slots share one table, as their
IDs are distinct. Runs in an environment of its own (README.md), so nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf
import tensorflow_recommenders_addons as tfra
from numpy.typing import NDArray
from tensorflow_recommenders_addons import dynamic_embedding as de

from benchmarks.cases import DENSE_LEARNING_RATE, LEARNING_RATE, MLP_WIDTHS, Case, Optimizer
from benchmarks.systems.base import System, UnavailableError
from benchmarks.workload import NUM_DENSE_FEATURES, Batch, resident_ids

__all__ = ["Tfra"]

v1 = tf.compat.v1

_MAX_RESIDENT = {16: 10_000_000}  # by dim; its rows take several times their size, and filling is slow
_OTHER_MAX_RESIDENT = 5_000_000
_FILL_IDS = 500_000


class Tfra(System):
    """Filled with as many of the rows as fit, the same share of each slot's."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        v1.disable_eager_execution()
        v1.set_random_seed(case.workload.seed)
        self._resident = _resident_rows(case)
        self._build()
        self._session = v1.Session(
            config=v1.ConfigProto(
                intra_op_parallelism_threads=case.threads, inter_op_parallelism_threads=case.threads
            )
        )
        self._session.run(v1.global_variables_initializer())
        self._fill()
        self._call = self._session.make_callable(self._target, feed_list=self._inputs)

    def prepare(self, batch: Batch) -> tuple[Any, ...]:
        if self.case.work == "lookup":  # which inserts nothing itself: every ID shall be found
            self._upsert(np.unique(batch.values))
        bags = np.repeat(np.arange(batch.lengths.size, dtype=np.int32), batch.lengths.ravel())
        return batch.values, bags, batch.dense, batch.labels

    @property
    def step(self) -> Callable[[Any], object]:
        return lambda inputs: self._call(*inputs)

    def versions(self) -> dict[str, str]:
        return {"tensorflow": tf.__version__, "tensorflow-recommenders-addons": tfra.__version__}

    def close(self) -> None:
        self._session.close()

    def _build(self) -> None:
        case = self.case
        batch_size, num_slots = case.workload.batch_size, case.workload.num_slots
        ids = v1.placeholder(tf.int64, [None])
        bags = v1.placeholder(tf.int32, [None])
        dense = v1.placeholder(tf.float32, [batch_size, NUM_DENSE_FEATURES])
        labels = v1.placeholder(tf.float32, [batch_size, 1])
        self._inputs = [ids, bags, dense, labels]
        self._table = de.get_variable(
            "rows",
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            dim=case.dim,
            initializer=v1.random_uniform_initializer(-0.01, 0.01),
            devices=["/CPU:0"],
            init_size=sum(self._resident),
        )
        unique, place = tf.unique(ids)
        rows, trainable = de.embedding_lookup(self._table, unique, return_trainable=True, name="lookup")
        # The output stays slot-major, [slots * batch, dim]: no transposition is charged to this peer.
        slot_major = tf.gather(rows, place)
        if case.workload.mean_ids is not None:
            slot_major = tf.math.unsorted_segment_sum(slot_major, bags, num_slots * batch_size)
        if case.work == "lookup":
            self._target = slot_major.op
        elif case.work == "train":
            gradient = tf.constant(1e-3, shape=[num_slots * batch_size, case.dim])
            gradients = tf.gradients(slot_major, trainable, grad_ys=gradient)
            self._target = _sparse_optimizer(case.optimizer).apply_gradients([(gradients[0], trainable)])
        else:
            pooled = tf.reshape(slot_major, [num_slots, batch_size, case.dim])
            pooled = tf.reshape(tf.transpose(pooled, [1, 0, 2]), [batch_size, num_slots * case.dim])
            loss, weights = _mlp_loss(tf.concat([dense, pooled], axis=1), labels)
            gradients = tf.gradients(loss, [trainable, *weights])
            self._target = tf.group(
                _sparse_optimizer(case.optimizer).apply_gradients([(gradients[0], trainable)]),
                v1.train.AdamOptimizer(DENSE_LEARNING_RATE).apply_gradients(
                    list(zip(gradients[1:], weights, strict=True))
                ),
            )

    def _fill(self) -> None:
        self._keys = v1.placeholder(tf.int64, [None])
        self._values = v1.placeholder(tf.float32, [None, self.case.dim])
        self._upsert_op = self._table.upsert(self._keys, self._values)
        self._random = np.random.default_rng(self.case.workload.seed)
        for slot, num_rows in enumerate(self._resident):
            ids = resident_ids(slot, num_rows, self.case.workload, self.case.fill)
            for begin in range(0, num_rows, _FILL_IDS):
                self._upsert(ids[begin : begin + _FILL_IDS])

    def _upsert(self, ids: NDArray[np.int64]) -> None:
        rows = self._random.uniform(-0.01, 0.01, (ids.size, self.case.dim)).astype(np.float32)
        self._session.run(self._upsert_op, {self._keys: ids, self._values: rows})


def _resident_rows(case: Case) -> list[int]:
    share = min(1.0, _MAX_RESIDENT.get(case.dim, _OTHER_MAX_RESIDENT) / sum(case.table_rows))
    return [max(1, int(rows * share)) for rows in case.table_rows]


def _sparse_optimizer(name: Optimizer) -> Any:
    optimizers = {
        "sgd": v1.train.GradientDescentOptimizer,
        "adagrad": v1.train.AdagradOptimizer,
        "adam": v1.train.AdamOptimizer,
    }
    if name not in optimizers:
        raise UnavailableError(f"tensorflow has no {name}")
    return de.DynamicEmbeddingOptimizer(optimizers[name](LEARNING_RATE))


def _mlp_loss(features: Any, labels: Any) -> tuple[Any, list[Any]]:
    """The loss of the dense model, and its weights."""
    weights = []
    width = int(features.shape[1])
    for index, next_width in enumerate((*MLP_WIDTHS, 1)):
        kernel = v1.get_variable(
            f"kernel_{index}", [width, next_width], initializer=v1.glorot_uniform_initializer()
        )
        bias = v1.get_variable(f"bias_{index}", [next_width], initializer=v1.zeros_initializer())
        weights += [kernel, bias]
        features = tf.nn.bias_add(tf.matmul(features, kernel), bias)
        if next_width != 1:
            features = tf.nn.relu(features)
        width = next_width
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=features))
    return loss, weights
