"""Each usage that the published documentation shows, with our own data: the same calls run here.

Slips of that documentation are corrected, and what each was is said where it is corrected. Scripts that need
servers are run by tests/integration; here the contexts stand on a store in this process.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, List  # noqa: UP035 (as documented)

import numpy as np
import pytest
import torch

from persia import _native
from persia.config import parse_embedding_config, parse_global_config
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import FailedPreconditionError, InvalidTypeError

BATCH_SIZE = 5
USERS = [[11, 12], [11], [], [11, 12, 13], [11] * 200]
SLOTS = {"user_id": {"dim": 8}, "gender": {"dim": 8}}


def user_feature() -> IDTypeFeature:
    """The documentation passes (data, name); the code of the time had (name, data). Both work."""
    return IDTypeFeature([np.array(ids, dtype=np.uint64) for ids in USERS], "user_id")  # type: ignore[arg-type]


# --- training data ---


def test_id_type_features_of_variable_length() -> None:
    feature = user_feature()
    assert (feature.name, feature.batch_size) == ("user_id", BATCH_SIZE)
    assert feature.offsets.tolist() == [0, 2, 3, 3, 6, 206]


def test_samples_made_one_by_one_of_nested_lists() -> None:
    """The documentation slices a list of lists, whose rows of different length no array can be made of: it
    means the row itself. An empty one stays, so that the batch keeps its size."""
    features = []
    for name, data in (("user_id", USERS), ("gender", [[0], [1], [0], [0], [1]])):
        samples = []
        for index in range(BATCH_SIZE):
            samples.append(np.array(data[index], dtype=np.uint64).reshape(-1))
        features.append(IDTypeFeature(name, samples))
    assert [len(feature.ids) for feature in features] == [206, 5]


def test_id_type_features_with_a_single_id() -> None:
    table = np.array([[0, 11, 21], [1, 12, 22], [0, 13, 23], [0, 15, 24], [1, 16, 25]], dtype=np.uint64)
    features = [
        IDTypeFeatureWithSingleID(name, table[0:BATCH_SIZE, column])
        for column, name in enumerate(["gender", "user_id", "photo_id"])
    ]
    assert [feature.ids.tolist() for feature in features] == table.T.tolist()


def test_non_id_type_features_of_several_dtypes_and_shapes() -> None:
    """`np.eye((5, 3) dtype=...)` lacks a comma, and takes two numbers: `np.eye(5, 3, dtype=...)`."""
    heights = np.array([[1.7], [1.8], [1.75], [1.6], [1.77]], dtype=np.float32)
    incomes = np.array([[3.0], [7.0], [2.0], [6.6], [3.0]], dtype=np.float32)
    features = [
        NonIDTypeFeature(heights, name="height"),
        NonIDTypeFeature(np.hstack([heights, incomes]), name="income_with_height"),
        NonIDTypeFeature(np.ones((BATCH_SIZE, 32, 32, 3), dtype=np.uint8), name="image"),
        NonIDTypeFeature(np.ones((BATCH_SIZE, 256), dtype=np.int8)),
        NonIDTypeFeature(np.eye(BATCH_SIZE, 3, dtype=np.float32)),
    ]
    assert [len(feature) for feature in features] == [BATCH_SIZE] * 5
    assert features[3].name == "non_id_type_feature_anonymous"


def test_labels() -> None:
    """`np.bool` was an alias of Python's bool then, was removed, and is numpy's own type again; and a stacked
    label needs both arrays in two dimensions, and the name of an array that exists."""
    clicks = np.array([0, 1, 0, 1, 1], dtype=np.bool_)
    incomes = np.array([[3.0], [7.0], [2.0], [6.6], [3.0]], dtype=np.float32)
    labels = [
        Label(clicks, name="ctr"),
        Label(incomes, name="income"),
        Label(np.hstack([clicks.reshape(-1, 1), incomes]), "ctr_with_income"),
        Label(np.ones((BATCH_SIZE, 4), dtype=bool)),
        Label(np.ones((BATCH_SIZE), dtype=np.float32)),
    ]
    assert [label.data.dtype.name for label in labels] == ["bool", "float32", "float32", "bool", "float32"]


DOCUMENTED_DTYPES = ["bool", "int8", "int16", "int32", "int64", "float32", "float64", "uint8"]


@pytest.mark.parametrize("dtype", DOCUMENTED_DTYPES)
def test_the_documented_dtypes(dtype: str) -> None:
    array = np.ones((BATCH_SIZE, 2), dtype=dtype)
    assert NonIDTypeFeature(array).data.dtype == Label(array).data.dtype == array.dtype


def test_a_batch_of_empty_samples_without_labels() -> None:
    features = [IDTypeFeature("empty_sample", np.array([[]] * 5, dtype=np.uint64))]  # type: ignore[arg-type]
    assert PersiaBatch(features, requires_grad=False).batch_size == 5


@pytest.mark.parametrize("encode", [json.dumps, pickle.dumps], ids=["json", "pickle"])
def test_meta_data(encode: Any) -> None:
    """The documentation passes `json.dumps(...)`, a str, which the code of the time dropped with a warning:
    it is encoded as UTF-8. It also forgets `requires_grad=False`, without which labels are needed."""
    features = [IDTypeFeature("empty", [np.array([], dtype=np.uint64)] * BATCH_SIZE)]
    info = encode({"batch_id": 100000000, "timestamp": time.time()})
    arrived = PersiaBatch.from_bytes(PersiaBatch(features, meta=info, requires_grad=False).to_bytes())
    assert arrived.meta == (info.encode() if isinstance(info, str) else info)


def complete_batch() -> PersiaBatch:
    return PersiaBatch(
        [user_feature(), IDTypeFeatureWithSingleID("gender", np.array([0, 1, 0, 0, 1], dtype=np.uint64))],
        non_id_type_features=[NonIDTypeFeature(np.ones((BATCH_SIZE, 3), dtype=np.float32))],
        labels=[Label(np.array([[0], [1], [0], [1], [1]], dtype=np.float32), name="ctr_label")],
        requires_grad=True,
        meta=json.dumps({"batch_id": 1}),
    )


def test_a_complete_batch() -> None:
    arrived = PersiaBatch.from_bytes(complete_batch().to_bytes())
    assert [feature.name for feature in arrived.id_type_features] == ["user_id", "gender"]
    assert arrived.labels[0].name == "ctr_label"


# --- contexts ---


class DNN(torch.nn.Module):
    """The documented signature; and what it forgets, a call of the base class' constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3 + 8 + 8, 1)

    def forward(
        self,
        non_id_type_feature_tensors: list[torch.Tensor],
        id_type_feature_embedding_tensors: list[torch.Tensor],
    ) -> torch.Tensor:
        joined = torch.cat([*non_id_type_feature_tensors, *id_type_feature_embedding_tensors], dim=1)
        return torch.sigmoid(self.linear(joined))


def backend() -> Any:
    from persia.pipeline.backend import EmbeddingBackend

    slots = parse_embedding_config({"slots_config": SLOTS})
    client = _native.EmbeddedClient(
        slots=slots.native_slots(), feature_index_prefix_bit=slots.feature_index_prefix_bit
    )
    return EmbeddingBackend(client, deadline_s=30.0)


def train_ctx(**options: Any) -> Any:
    from persia.ctx import TrainCtx
    from persia.embedding.optim import Adagrad

    model = DNN()
    arguments: dict[str, Any] = {
        "model": model,
        "embedding_optimizer": Adagrad(lr=1e-2),
        "dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "mixed_precision": False,  # the documentation's samples have a GPU
        "backend": backend(),
    }
    return TrainCtx(**(arguments | options))


def test_a_training_loop() -> None:
    """The documentation spells the loader `Dataloader` and `Dataloder`, iterates over a name that it does not
    define, and takes the loss of `label` where it has `labels`."""
    from persia.data import Dataloader, Dataloder, IterableDataset

    class Batches(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            for _ in range(3):
                yield complete_batch()

    loss_fn = torch.nn.BCELoss(reduction="mean")
    with train_ctx() as ctx:
        for make_loader in (Dataloader, Dataloder):
            losses = []
            for _, data in enumerate(make_loader(Batches(10))):
                assert data.meta == b'{"batch_id": 1}'
                output, labels = ctx.forward(data)
                loss = loss_fn(output, labels[0])
                losses.append(ctx.backward(loss).item())
            assert len(losses) == 3
            assert losses[-1] < losses[0]


def test_a_stream_of_a_data_loader() -> None:
    """Without a broker the loader is a function of the same process."""
    from persia.ctx import DataCtx
    from persia.data import Dataloder, StreamingDataset
    from persia.env import get_rank, get_world_size

    def data_loader() -> None:
        with DataCtx() as ctx:
            for _ in range(3):
                ctx.send_data(complete_batch())
            ctx.send_data(PersiaBatch(complete_batch().id_type_features, requires_grad=False))

    rank, world_size = get_rank(), get_world_size()
    assert (rank, world_size) == (None, None)  # outside of the launcher
    loss_fn = torch.nn.BCELoss(reduction="mean")
    with train_ctx(backend=None, slots={"slots_config": SLOTS}) as ctx:
        for batch_idx, data in enumerate(Dataloder(StreamingDataset(10, data_loader))):
            if batch_idx < 3:
                (output, labels) = ctx.forward(data)
                ctx.backward(loss_fn(output, labels[0]))
        assert batch_idx == 3
        ctx.wait_for_gradients()
        assert (ctx.counters.batches_trained, ctx.counters.batches_evaluated) == (3, 1)


def train_one(ctx: Any) -> torch.Tensor:
    output, labels = ctx.forward(ctx.get_embedding_from_data(complete_batch()))
    ctx.backward(torch.nn.functional.binary_cross_entropy(output, labels[0]))
    ctx.wait_for_gradients()
    result: torch.Tensor = output.detach()
    return result


def test_checkpointing_together(tmp_path: Path) -> None:
    """The documentation loads first, from where nothing is yet."""
    checkpoint_dir = str(tmp_path / "checkpoint")
    with train_ctx() as ctx:
        for batch_idx in range(3):
            expected = train_one(ctx)
            if batch_idx == 1:
                ctx.dump_checkpoint(checkpoint_dir)
    with train_ctx() as ctx:
        ctx.load_checkpoint(checkpoint_dir)
        assert torch.equal(train_one(ctx), expected)


def test_checkpointing_separately(tmp_path: Path) -> None:
    checkpoint_dir = str(tmp_path / "checkpoint")
    with train_ctx() as ctx:
        train_one(ctx)
        ctx.dump_embedding(checkpoint_dir, True)
        torch.save(ctx.model.state_dict(), tmp_path / "model.pt")
        expected = train_one(ctx)
    with train_ctx() as ctx:
        ctx.model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
        ctx.load_embedding(checkpoint_dir, True)
        assert torch.equal(train_one(ctx), expected)


def test_embedding_optimizers() -> None:
    from persia.embedding.optim import SGD, Adagrad, Adam

    assert [make(1e-3).lr for make in (SGD, Adagrad, Adam)] == [1e-3] * 3


def test_hyper_parameters_of_embeddings() -> None:
    from persia.embedding import EmbeddingConfig

    config = EmbeddingConfig(emb_initialization=(-1, 1), admit_probability=0.8, weight_bound=1)
    with train_ctx(embedding_config=config) as ctx:
        batch = ctx.get_embedding_from_data(complete_batch())
        for tensor in batch.consume_all_id_type_feature_embedding_tensors():
            assert bool(torch.isfinite(tensor).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_mixed_precision_needs_a_gpu() -> None:
    with pytest.raises(Exception, match=r"(?i)mixed.precision.*cuda"):
        train_ctx(mixed_precision=True)


def test_the_option_for_ddp() -> None:
    """The documentation says `init_method`, the code of the time `initialization_method`."""
    from persia.distributed import DDPOption

    assert DDPOption(backend="nccl", init_method="tcp").initialization_method == "tcp"
    assert DDPOption(initialization_method="file", backend="gloo", sync_file="f").backend == "gloo"


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", "low_precision_decentralized", "bytegrad", "async"]
)
def test_the_option_for_bagua_is_refused(algorithm: str) -> None:
    from persia.distributed import BaguaDistributedOption

    with pytest.raises(FailedPreconditionError, match=f"{algorithm}.*discontinued"):
        BaguaDistributedOption(algorithm)


def test_features_from_bytes_as_an_inference_handler_gets_them() -> None:
    """Without the documented `PyPersiaBatchData`, which never was in the package: `PersiaBatch.to_bytes`."""
    with train_ctx() as ctx:
        batch = ctx.get_embedding_from_bytes(bytes(bytearray(complete_batch().to_bytes())), None)
        dense, sparse, _ = ctx.prepare_features(batch)
        with torch.no_grad():
            results = ctx.model(dense, sparse)
    assert torch.reshape(results, (-1,)).tolist() == pytest.approx(results.flatten().tolist())
    assert len(results) == BATCH_SIZE


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_dense_model_saved_for_torchserve(tmp_path: Path) -> None:
    """With `typing.List` in the signature, as documented."""

    class Documented(DNN):
        def forward(
            self,
            non_id_type_feature_tensors: List[torch.Tensor],  # noqa: UP006
            id_type_feature_embedding_tensors: List[torch.Tensor],  # noqa: UP006
        ) -> torch.Tensor:
            joined = torch.cat(non_id_type_feature_tensors + id_type_feature_embedding_tensors, dim=1)
            return torch.sigmoid(self.linear(joined))

    model = Documented()
    jit_model = torch.jit.script(model)
    jit_model.save(str(tmp_path / "your_dense_model_name.pth"))
    features = [torch.ones(2, 3)], [torch.ones(2, 8), torch.zeros(2, 8)]
    loaded = torch.jit.load(str(tmp_path / "your_dense_model_name.pth"))
    assert torch.equal(loaded(*features), model(*features))


def test_a_handler_of_torchserve(
    embedding_worker: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As documented, with a stand-in for TorchServe's base class."""
    from persia.ctx import InferCtx
    from persia.service import get_embedding_worker_services

    device_id = 0 if torch.cuda.is_available() else None

    class BaseHandler:
        def initialize(self, context: object) -> None:
            self.model = DNN().to("cpu" if device_id is None else device_id)

    class PersiaHandler(BaseHandler):
        def initialize(self, context: object) -> None:
            super().initialize(context)
            embedding_worker_addrs = get_embedding_worker_services()
            self.persia_context = InferCtx(embedding_worker_addrs, device_id=device_id)
            self.persia_context.wait_for_serving()

        def preprocess(self, data: Any) -> Any:
            batch = data[0].get("batch")
            batch = bytes(batch)
            batch = self.persia_context.get_embedding_from_bytes(batch, device_id)
            model_input = self.persia_context.prepare_features(batch)
            return model_input

        def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            denses, sparses, _ = data
            with torch.no_grad():
                results = self.model(denses, sparses)
            return results

        def postprocess(self, data: Any) -> Any:
            data = torch.reshape(data, (-1,))
            data = data.tolist()
            return [data]

    address = embedding_worker({"slots_config": SLOTS}, {"user_id": {11: 0.5}, "gender": {1: 0.25}})
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", address)
    handler = PersiaHandler()
    handler.initialize(None)
    with handler.persia_context:  # ends it
        request = [{"batch": bytearray(complete_batch().to_bytes())}]
        (answer,) = handler.postprocess(handler.inference(handler.preprocess(request)))
    user = torch.tensor([0.5, 0.5, 0, 0.5, 100.0]).reshape(-1, 1).expand(-1, 8)
    gender = torch.tensor([0, 0.25, 0, 0, 0.25]).reshape(-1, 1).expand(-1, 8)
    expected = handler.model.cpu()([torch.ones(BATCH_SIZE, 3)], [user, gender])
    assert answer == pytest.approx(expected.flatten().tolist())


def test_one_array_where_samples_are_meant_is_named() -> None:
    with pytest.raises(InvalidTypeError, match="IDTypeFeatureWithSingleID"):
        IDTypeFeature("user_id", np.array([1, 2], dtype=np.uint64))  # type: ignore[arg-type]


# --- launchers ---

DOCUMENTED_COMMANDS = [
    "data-loader --replica-index 0 --replica-size 2",
    "data-loader --replica-index 1 --replica-size 2",
    *(
        "embedding-parameter-server --embedding-config config/embedding_config.yml "
        f"--global-config config/global_config.yml --replica-index {i} --replica-size 3 --port {10000 + i}"
        for i in range(3)
    ),
]


@pytest.mark.parametrize("line", DOCUMENTED_COMMANDS)
def test_a_command_of_a_procfile_or_a_compose_file(line: str) -> None:
    """Only understood here: tests/integration runs such commands."""
    import click

    from persia.launcher import cli

    name, *arguments = line.split()
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    parsed = command.make_context(name, arguments).params
    options = zip(arguments[::2], arguments[1::2], strict=True)
    assert all(str(parsed[option[2:].replace("-", "_")]) == value for option, value in options)


# --- configuration ---


def test_the_global_configuration() -> None:
    config = parse_global_config(
        {
            "common_config": {
                "metrics_config": {"enable_metrics": True, "push_interval_sec": 10},
                "job_type": "Train",
                "checkpointing_config": {"num_workers": 8},
            },
            "embedding_parameter_server_config": {
                "capacity": 1000000,
                "num_hashmap_internal_shards": 1,
                "enable_incremental_update": False,
                "incremental_buffer_size": 5000000,
                "incremental_channel_capacity": 1000,
            },
            "embedding_worker_config": {"forward_buffer_size": 1000},
        }
    )
    assert config.common_config.metrics_config.push_interval_seconds == 10


def test_the_embedding_configuration() -> None:
    """The example says `slot_config`, its description `slots_config`."""
    names = ["workclass", "education", "marital_status", "occupation", "race"]
    config = parse_embedding_config(
        {
            "feature_index_prefix_bit": 8,
            "slot_config": {name: {"dim": 8, "embedding_summation": True} for name in names},
            "feature_groups": {
                "group1": ["workclass", "education", "race"],
                "group2": ["marital_status", "occupation"],
            },
        }
    )
    assert config.group_numbers() == {
        "workclass": 1,
        "education": 1,
        "race": 1,
        "marital_status": 2,
        "occupation": 2,
    }
