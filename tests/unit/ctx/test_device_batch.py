"""The path of a batch with a device, on the CPU, where it must give the values of training without one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.gpu.check import NAMES, SLOTS, differences, make_batch
from persia import _native
from persia.config import parse_embedding_config
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD, Adagrad
from persia.errors import InternalError, InvalidArgumentError
from persia.job import batch_pipeline
from persia.pipeline.backend import EmbeddingBackend
from persia.pipeline.device_batch import CudaLane, Lane, OutgoingGradients, lane_of

CPU = torch.device("cpu")
STEPS = 6


class Batches(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        return map(make_batch, range(STEPS))


class Model(torch.nn.Module):
    def __init__(self, unused: str | None = None) -> None:
        super().__init__()
        dims = {name: slot["dim"] for name, slot in SLOTS["slots_config"].items()} | {"raw": 3 * 7}
        self._used = [name for name in NAMES if name != unused]
        self.layer = torch.nn.Linear(4 + sum(dims[name] for name in self._used), 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        by_name = dict(zip(NAMES, embeddings, strict=True))
        used = [by_name[name].flatten(1) for name in self._used]
        output: torch.Tensor = self.layer(torch.cat([*(d.float() for d in dense), *used], dim=1))
        return output


def trained(slots: dict[str, Any], unused: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """All that training computes: losses, dense weights, rows by slot; and counts."""
    torch.manual_seed(0)
    model = Model(unused)
    losses = []
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.5, 0.5), seed=1),
        slots=slots,
        **kwargs,
    ) as ctx:
        for batch in DataLoader(Batches(buffer_size=3), reproducible=True, embedding_staleness=1):
            output, labels = ctx.forward(batch)
            assert labels is not None
            loss = (output - labels[0]).square().mean()
            ctx.backward(loss)
            losses.append(loss.item())
        with eval_ctx() as evaluation:
            found = evaluation.get_embedding_from_data(make_batch(0))
            rows = [tensor.numpy().copy() for tensor in found.consume_all_id_type_feature_embedding_tensors()]
        counters = ctx.counters
    return {
        "losses": losses,
        "weights": [p.detach().numpy() for p in model.parameters()],
        "rows": rows,
        "counts": (counters.batches_trained, counters.nonfinite_slots, counters.skipped_slots),
    }


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Called, it makes the jobs that follow use the path of devices; what it returns counts batches sent."""

    class Counting(Lane):
        def send(self, host: torch.Tensor) -> Any:
            sent.append(len(host))
            return super().send(host)

        def fetch(self, values: torch.Tensor) -> Any:
            time.sleep(0.005)  # a device lags behind: what reads rows too early finds old ones
            return super().fetch(values)

    sent: list[int] = []

    def use() -> list[int]:
        lane = Counting(CPU)
        monkeypatch.setattr(batch_pipeline, "lane_of", lambda device: lane)
        return sent

    return use


class Cluster:
    """A parameter server and an embedding worker in this process, behind sockets."""

    def __init__(self) -> None:
        config = parse_embedding_config(SLOTS)
        self._server = _native.ParameterServer(
            replica_index=0, replica_size=1, capacity=10_000, num_internal_shards=2
        )
        self._worker = _native.EmbeddingWorker(
            slots=config.native_slots(),
            feature_index_prefix_bit=config.feature_index_prefix_bit,
            num_servers=1,
        )
        self._worker.set_server(0, f"127.0.0.1:{self._server.start('127.0.0.1', 0)}")
        self._address = f"127.0.0.1:{self._worker.start('127.0.0.1', 0)}"

    def backend(self, wire_dtype: str) -> EmbeddingBackend:
        client = _native.RemoteClient(1, wire_dtype=wire_dtype)
        client.set_worker(0, self._address)
        return EmbeddingBackend(client, deadline_s=60.0)

    @property
    def num_slots_as_rows(self) -> int:
        count: int = self._worker.stats()["num_slots_as_rows"]
        return count

    def stop(self) -> None:
        self._worker.stop()
        self._server.stop()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["counts"] == expected["counts"]
    assert found["losses"] == expected["losses"]
    for key in ("weights", "rows"):
        for name, ours, theirs in zip(NAMES, found[key], expected[key], strict=False):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{key} {name}")


def clip(name: str, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"mixed_precision": "fp16"}, id="scaled"),
        pytest.param({"on_embedding_gradient": clip}, id="hook"),
        pytest.param({"unused": "root"}, id="slot-without-gradient"),
        pytest.param({"synchronous": ["single", "raw", "hot"]}, id="synchronous-slots"),
    ],
)
def test_a_device_computes_what_training_without_one_does(
    options: dict[str, Any], on_device: Callable[[], list[int]]
) -> None:
    options = dict(options)
    slots = {**SLOTS, "slots_config": {name: dict(slot) for name, slot in SLOTS["slots_config"].items()}}
    for name in (synchronous := options.pop("synchronous", ())):
        slots["slots_config"][name]["consistency"] = "synchronous"
    expected = trained(slots, **options)
    sent = on_device()
    found = trained(slots, **options)
    assert len(sent) == STEPS * (2 if synchronous else 1) + 1
    assert_same(found, expected)


@pytest.fixture
def new_cluster() -> Iterator[Callable[[], Cluster]]:
    made: list[Cluster] = []

    def start() -> Cluster:
        made.append(Cluster())
        return made[-1]

    yield start
    for cluster in made:
        cluster.stop()


@pytest.mark.parametrize("wire_dtype", ["float32", "float16"])
def test_servers_behind_sockets_get_the_same_gradients(
    wire_dtype: str, on_device: Callable[[], list[int]], new_cluster: Callable[[], Cluster]
) -> None:
    first, second = new_cluster(), new_cluster()
    expected = trained(SLOTS, backend=first.backend(wire_dtype))
    on_device()
    found = trained(SLOTS, backend=second.backend(wire_dtype))
    assert bool(second.num_slots_as_rows) == (wire_dtype == "float32")
    assert_same(found, expected)


@pytest.mark.parametrize("embedded", [True, False])
def test_a_slot_whose_gradient_is_not_finite_is_left_out_alone(
    embedded: bool, on_device: Callable[[], list[int]], new_cluster: Callable[[], Cluster]
) -> None:
    def poison(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        value = {"single": float("nan"), "hot": float("inf"), "raw": float("-inf"), "empty": float("inf")}
        if name in value:
            gradient = gradient.clone()
            gradient[-1, 0] = value[name]
        return gradient

    backends = [None if embedded else new_cluster().backend("float32") for _ in range(2)]
    expected = trained(SLOTS, on_embedding_gradient=poison, backend=backends[0])
    on_device()
    found = trained(SLOTS, on_embedding_gradient=poison, backend=backends[1])
    assert found["counts"][1] > 3 * STEPS
    assert_same(found, expected)


def test_gradients_that_overflow_in_their_sum_leave_their_slot_out(
    on_device: Callable[[], list[int]],
) -> None:
    def grow(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        return torch.full_like(gradient, 3e38) if name in ("hot", "many") else None

    expected = trained(SLOTS, on_embedding_gradient=grow)
    on_device()
    found = trained(SLOTS, on_embedding_gradient=grow)
    assert found["counts"][1] == 2 * STEPS
    assert_same(found, expected)


def test_only_devices_have_a_lane() -> None:
    assert lane_of(None) is None
    assert lane_of(CPU) is None


def test_a_lane_sets_its_device_before_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[Any] = []

    @contextlib.contextmanager
    def enter(what: Any) -> Iterator[None]:
        inside.append(what)
        yield
        inside.pop()

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, enter)
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    lane, host = CudaLane(device := torch.device("cuda", 1)), mock.Mock()
    host.to.side_effect = lambda *args, **kwargs: list(inside)
    assert lane.send(host).memory == [device, lane._in]
    with lane.behind(mock.Mock(), []):
        assert inside == [device, lane._out]


def test_gradients_of_no_leaf_are_none() -> None:
    leaves = [("a", torch.zeros(2, 3)), ("b", torch.zeros(2, 3))]
    assert OutgoingGradients(Lane(CPU), [], leaves, 1.0).fetch() == [("a", None), ("b", None)]


def test_the_check_of_devices_finds_what_differs() -> None:
    class Faulty(Lane):
        def send(self, host: torch.Tensor) -> Any:
            host[-1] ^= 1  # of the last label
            return super().send(host)

        def fetch(self, values: torch.Tensor) -> Any:
            return super().fetch(values) + 1

    assert differences(Lane(CPU), num_batches=3) == []
    found = differences(Faulty(CPU), num_batches=1)
    assert {"batch 0: dense", *(f"batch 0: gradient of {name}" for name in NAMES if name != "empty")} == {
        line for line in found if "magnitude" not in line
    }


def trained_in_pairs() -> list[np.ndarray[Any, Any]]:
    """Rows after backward passes through two batches each; the gradients of the second batch count twice."""
    torch.manual_seed(0)
    model = Model()
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.5, 0.5), seed=1),
        slots=SLOTS,
        backward_workers_size=1,  # both batches of a pair may update a row, always in this order
    ) as ctx:
        for number in range(0, STEPS, 2):
            batches = [ctx.get_embedding_from_data(make_batch(number + i)) for i in range(2)]
            first, second = (ctx.forward(batch)[0] for batch in batches)
            ctx.backward(first.square().mean() + 2 * second.square().mean())
            ctx.wait_for_gradients()
        found = ctx.get_embedding_from_data(make_batch(0))
        return [t.detach().numpy().copy() for t in found.consume_all_id_type_feature_embedding_tensors()]


def test_one_backward_serves_two_batches(on_device: Callable[[], list[int]]) -> None:
    expected = trained_in_pairs()
    sent = on_device()
    for ours, theirs in zip(trained_in_pairs(), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(sent) == STEPS + 1


@pytest.fixture
def ctx(on_device: Callable[[], list[int]]) -> Iterator[TrainCtx]:
    on_device()
    with TrainCtx(
        model=torch.nn.Linear(1, 1),
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1),
        slots=SLOTS,
    ) as ctx:
        yield ctx


def test_tensors_without_gradients_may_be_worked_on_in_place(ctx: TrainCtx) -> None:
    batch = make_batch(0)
    batch.requires_grad = False
    dense, embeddings, labels = ctx.prepare_features(ctx.get_embedding_from_data(batch))
    weight = torch.ones(1, requires_grad=True)
    saved = (embeddings[0] * weight).sum() + (dense[0] * weight).sum()
    assert labels is not None
    for tensor in (*embeddings[1:], *labels):
        tensor.mul_(2)
    saved.backward()  # type: ignore[no-untyped-call]


def test_one_leaf_may_be_written_after_autograd_has_saved_another(ctx: TrainCtx) -> None:
    _, embeddings, _ = ctx.prepare_features(ctx.get_embedding_from_data(make_batch(0)))
    saved = (embeddings[0] * torch.ones(1, requires_grad=True)).sum()
    with torch.no_grad():
        for tensor in embeddings[1:]:
            tensor.clamp_(-1, 1)
    saved.backward()  # type: ignore[no-untyped-call]


def test_dense_features_and_labels_keep_no_other_memory(ctx: TrainCtx) -> None:
    dense, _, labels = ctx.prepare_features(ctx.get_embedding_from_data(make_batch(0)))
    assert labels is not None
    for tensor in (*dense, *labels):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_default_device_of_the_script_changes_no_lookup(ctx: TrainCtx) -> None:
    with torch.device("meta"):
        dense, _, _ = ctx.prepare_features(ctx.get_embedding_from_data(make_batch(0)))
    assert dense[0].device == CPU


def rows_after(
    steps: int, loss: Callable[[torch.Tensor, int], torch.Tensor], hook: Any = None
) -> tuple[list[float], int]:
    """The first values of rows 1 to 3 after batches with the bags [1, 2], [] and [3]; slots left out."""

    def batch(bags: list[list[int]]) -> PersiaBatch:
        samples = [np.array(bag, np.uint64) for bag in bags]
        dense = np.zeros((len(bags), 1), np.float32)
        return PersiaBatch(
            [IDTypeFeature("bags", samples)],
            non_id_type_features=[NonIDTypeFeature(dense)],
            labels=[Label(dense)],
        )

    with TrainCtx(
        model=torch.nn.Identity(),
        embedding_optimizer=SGD(1.0),
        dense_optimizer=torch.optim.SGD([weight := torch.nn.Parameter(torch.zeros(1))], lr=0.1),
        embedding_config=EmbeddingConfig(emb_initialization=(0.5, 0.5), seed=1),
        slots={"slots_config": {"bags": {"dim": 4}}},
        on_embedding_gradient=hook,
    ) as ctx:
        for step in range(steps):
            _, embeddings, _ = ctx.prepare_features(ctx.get_embedding_from_data(batch([[1, 2], [], [3]])))
            ctx.backward(loss(embeddings[0], step) + 0 * weight.sum())
        ctx.wait_for_gradients()
        found = ctx.get_embedding_from_data(batch([[1], [2], [3]]))
        (rows,) = found.consume_all_id_type_feature_embedding_tensors()
        return rows[:, 0].tolist(), ctx.counters.nonfinite_slots


class SameMemory(torch.autograd.Function):
    """A sum whose gradient is 0.5 ** step, in the memory of the step before: what a CUDA graph does."""

    memory = torch.zeros(3, 4)

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, step: int) -> torch.Tensor:
        ctx.step = step
        return values.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return SameMemory.memory.fill_(0.5**ctx.step).detach(), None


@pytest.fixture
def lag(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Jobs use the path of devices, and read no gradient until this is set."""
    has_ended = threading.Event()

    class Late(Lane):
        @contextlib.contextmanager
        def behind(self, mark: Any, read: Any) -> Iterator[None]:
            assert has_ended.wait(60)
            yield

    monkeypatch.setattr(batch_pipeline, "lane_of", lambda device: Late(CPU))
    return has_ended


@pytest.mark.parametrize("by_hook", [False, True])
def test_gradients_are_copied_before_their_memory_is_written_again(
    by_hook: bool, lag: threading.Event
) -> None:
    steps, buffer = iter(range(3)), torch.zeros(3, 4)

    def loss(values: torch.Tensor, step: int) -> torch.Tensor:
        if step == 2:
            lag.set()
        return values.sum() if by_hook else SameMemory.apply(values, step)  # type: ignore[no-untyped-call]

    def hook(name: str, gradient: torch.Tensor) -> torch.Tensor:
        return buffer.copy_(gradient).mul_(0.5 ** next(steps))

    assert rows_after(3, loss, hook if by_hook else None) == ([0.5 - 1.75] * 3, 0)


def test_a_gradient_of_a_sample_without_ids_that_is_not_finite_leaves_its_slot_out(
    on_device: Callable[[], list[int]],
) -> None:
    def spoil(name: str, gradient: torch.Tensor) -> torch.Tensor:
        gradient[1, 0] = float("nan")  # of the empty bag
        return gradient

    for place in (lambda: None, on_device):
        place()
        assert rows_after(1, lambda values, step: values.sum(), spoil) == ([0.5] * 3, 1)


def test_a_batch_whose_copy_to_the_device_fails_is_counted_once(
    ctx: TrainCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "send", mock.Mock(side_effect=RuntimeError("out of memory")))
    batches = [make_batch(i) for i in range(2)]
    batches[1].requires_grad = False
    for batch in batches:
        with pytest.raises(InternalError, match="the copy to the device of batch 0: .*out of memory"):
            ctx.get_embedding_from_data(batch)
    ctx._pipeline.reaper.close(60)
    counts = ctx.counters
    assert (counts.batches_received, counts.batches_released, counts.batches_failed) == (2, 1, 1)


def test_a_batch_for_a_device_that_is_not_there_is_not_received(
    ctx: TrainCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError, match="device_id: 99 invalid!"):
        ctx.get_embedding_from_data(make_batch(0), device_id=99)
    monkeypatch.setattr(batch_pipeline, "lane_of", mock.Mock(side_effect=RuntimeError("no streams")))
    with pytest.raises(RuntimeError, match="no streams"):
        ctx.get_embedding_from_data(make_batch(0))
    assert ctx.counters.batches_received == 0


class OldBackend(EmbeddingBackend):
    """Written when lookups had no `as_rows`."""

    def lookup_direct(  # type: ignore[override]
        self, id_features: bytes, *, requires_grad: bool, slots: int
    ) -> Any:
        return super().lookup_direct(id_features, requires_grad=requires_grad, slots=slots)


def test_without_a_device_backends_need_not_know_of_rows(new_cluster: Callable[[], Cluster]) -> None:
    backend = OldBackend(new_cluster().backend("float32")._client, deadline_s=60.0)
    with TrainCtx(
        model=torch.nn.Linear(1, 1),
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1),
        slots=SLOTS,
        backend=backend,
    ) as ctx:
        assert ctx.get_embedding_from_data(make_batch(0)).batch_size == 33
