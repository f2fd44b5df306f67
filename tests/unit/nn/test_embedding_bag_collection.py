"""EmbeddingBagCollection as a torch module: what goes in, what autograd and torch see, what is refused.

That its numbers are right: tests/numerics/test_embedding_bags_against_torch.py, and natively
client/embedding_bags_test.cc.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from persia.config import HashStackConfig, SlotConfig, SlotsConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad, Adam
from persia.errors import (
    ConfigError,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    ResourceExhaustedError,
)
from persia.nn import EmbeddingBagCollection

ZEROS = EmbeddingConfig(emb_initialization=(0.0, 0.0), weight_bound=0.0)


def from_zero(**options: Any) -> EmbeddingBagCollection:
    """Slots "a" (dim 2) and "b" (dim 3) whose rows begin with zeros and become minus their gradient."""
    return EmbeddingBagCollection({"a": 2, "b": 3}, SGD(lr=1.0), embedding_config=ZEROS, **options)


# Two samples: "a" has 1 and 2, "b" has none and 3.
VALUES, LENGTHS = torch.tensor([1, 2, 3]), torch.tensor([[1, 1], [0, 1]])


def read(ebc: EmbeddingBagCollection) -> list[list[float]]:
    with torch.no_grad():
        rows: list[list[float]] = ebc(VALUES, LENGTHS).tolist()
    return rows


# --- shapes and inputs ---


def test_shape_dtype_and_names() -> None:
    ebc = from_zero()
    pooled = ebc(VALUES, LENGTHS)
    assert (pooled.shape, pooled.dtype) == ((2, 5), torch.float32)
    assert pooled.requires_grad
    assert (ebc.slot_names, ebc.out_features) == (["a", "b"], 5)
    assert repr(ebc) == "EmbeddingBagCollection(a=2, b=3; SGD, rows=3)"


def test_negative_ids_are_the_unsigned_ones_of_their_bits() -> None:
    ebc = EmbeddingBagCollection({"a": 4}, SGD(lr=1.0))
    lengths = torch.ones(1, 2, dtype=torch.int64)
    signed = ebc(torch.tensor([-1, -(2**63)]), lengths)
    unsigned = ebc(torch.tensor([2**64 - 1, 2**63], dtype=torch.uint64), lengths)
    assert torch.equal(signed, unsigned)
    assert ebc.stats().num_rows == 2


def test_inputs_of_any_strides() -> None:
    ebc = EmbeddingBagCollection({"a": 4, "b": 4}, SGD(lr=1.0))
    values, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([[1, 0, 1], [2, 1, 0]])
    expected = ebc(values, lengths)
    strided = values.repeat_interleave(2)[::2]
    transposed = lengths.t().contiguous().t()
    assert not strided.is_contiguous()
    assert not transposed.is_contiguous()
    assert torch.equal(ebc(strided, transposed), expected)


def test_a_batch_without_samples() -> None:
    ebc = from_zero()
    pooled = ebc(torch.empty(0, dtype=torch.int64), torch.empty(2, 0, dtype=torch.int64))
    assert pooled.shape == (0, 5)
    pooled.sum().backward()


@pytest.mark.parametrize(
    ("values", "lengths", "named"),
    [
        (VALUES.view(3, 1), LENGTHS, "values: expected 1 dimension"),
        (VALUES, LENGTHS.flatten(), r"lengths has the shape \[\d\], must be \[2 slots, batch\]"),
        (VALUES, LENGTHS[:1], "lengths has 1 rows.*2 slots"),
        (VALUES, torch.tensor([[1, 1], [0, -1]]), "slot 'b': the length of sample 1 is -1"),
        (VALUES, torch.tensor([[1, 1], [1, 1]]), "slot 'b'.*more IDs than the 1"),
        (VALUES, torch.tensor([[1, 1], [0, 0]]), "3 IDs but lengths add up to 2"),
        (VALUES, torch.tensor([[2**62, 2**62], [2**62, 2**62]]), "slot 'a'"),
        (VALUES, None, "lengths is missing"),
    ],
)
def test_lengths_that_do_not_fit(values: torch.Tensor, lengths: torch.Tensor | None, named: str) -> None:
    ebc = from_zero()
    with pytest.raises(InvalidArgumentError, match=named):
        ebc(values, lengths)
    assert ebc.stats().num_rows == 0


@pytest.mark.parametrize(
    ("values", "lengths", "named"),
    [
        (VALUES.int(), LENGTHS, "values is torch.int32"),
        (VALUES.float(), LENGTHS, "values is torch.float32"),
        ([1, 2, 3], LENGTHS, "values is a list.*KeyedJaggedTensor"),
        (VALUES.numpy(), LENGTHS, "values is a ndarray"),
        (VALUES, LENGTHS.int(), "lengths is torch.int32"),
        (VALUES, [[1, 1], [0, 1]], "lengths is a list"),
    ],
)
def test_other_types_are_refused(values: Any, lengths: Any, named: str) -> None:
    with pytest.raises(InvalidTypeError, match=named):
        from_zero()(values, lengths)


# --- training ---


def test_backward_updates_the_rows_once_each() -> None:
    ebc = from_zero()
    ebc(torch.tensor([1, 1, 1, 3]), torch.tensor([[2, 1], [0, 1]])).sum().backward()
    assert ebc.stats().num_updated == 2
    assert read(ebc) == [[-3, -3, 0, 0, 0], [0, 0, -1, -1, -1]]


@pytest.mark.parametrize(
    "make",
    [
        lambda g: g.t().contiguous().t(),
        lambda g: torch.cat([g, g], dim=1)[:, :5],
        lambda g: g[:, :1].expand(2, 5),
        lambda g: torch.complex(g, -g).conj().imag,  # a negation that is not yet carried out
        lambda g: g.clone().requires_grad_(),
    ],
    ids=["transposed", "column slice", "expanded", "negated", "requires grad"],
)
def test_gradients_of_any_layout(make: Any) -> None:
    gradient = make(torch.tensor([[1.0, 2, 3, 4, 5], [6, 7, 8, 9, 10]]))
    ebc = from_zero()
    ebc(VALUES, LENGTHS).backward(gradient)
    first, second = (-gradient).tolist()
    assert read(ebc) == [[*first[:2], 0, 0, 0], second]


def test_a_loss_of_some_columns_leaves_the_others_as_they_are() -> None:
    ebc = from_zero()
    ebc(VALUES, LENGTHS)[:, 3].sum().backward()
    assert read(ebc) == [[0, 0, 0, 0, 0], [0, 0, 0, -1, 0]]


def test_gradients_flow_to_what_the_model_has_besides() -> None:
    ebc, weight = from_zero(), torch.nn.Parameter(torch.ones(5))
    ebc.set_embeddings("a", torch.tensor([1, 2]), torch.tensor([[1.0, 2], [3, 4]]))
    (ebc(VALUES, LENGTHS) * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4, 6, 0, 0, 0]
    assert read(ebc)[0] == [0, 1, 0, 0, 0]


def test_batches_wait_for_their_gradients_in_any_order() -> None:
    ebc = from_zero()
    outputs = [ebc(VALUES, LENGTHS) for _ in range(6)]
    for factor in (5, 0, 3):
        (outputs[factor] * factor).sum().backward()
    del outputs  # three without a gradient
    assert read(ebc)[1] == [-8.0] * 5


def test_one_backward_of_several_lookups() -> None:
    ebc = from_zero()
    (ebc(VALUES, LENGTHS).sum() + 2 * ebc(VALUES, LENGTHS).sum()).backward()
    assert read(ebc)[1] == [-3.0] * 5


def test_a_second_backward_is_refused() -> None:
    ebc = from_zero()
    loss = ebc(VALUES, LENGTHS).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(FailedPreconditionError, match="updated already"):
        loss.backward()
    assert read(ebc)[1] == [-1.0] * 5


def test_nonfinite_gradients_are_dropped_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    ebc = from_zero()
    gradient = torch.tensor([[float("nan"), 0, 0, 0, 0], [1, 1, 1, float("inf"), 1]])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ebc(VALUES, LENGTHS).backward(gradient)
    assert read(ebc) == [[0, 0, 0, 0, 0], [-2, -2, 0, 0, 0]]
    assert (ebc.stats().num_nonfinite, ebc.stats().num_updated) == (4, 2)
    (record,) = caplog.records
    assert record.getMessage().startswith("the gradients of 2 rows were NaN or infinite")


def test_an_ordinary_training_loop_learns() -> None:
    torch.manual_seed(0)
    users, items = torch.randint(0, 2**40, (30,)), torch.randint(0, 2**40, (30,))
    user_taste, item_taste = torch.randn(30), torch.randn(30)
    ebc = EmbeddingBagCollection({"user": 4, "item": 4}, Adagrad(lr=0.1))
    dense = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model = torch.nn.ModuleDict({"embeddings": ebc, "dense": dense})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    lengths = torch.ones(2, 64, dtype=torch.int64)
    losses = []
    for _ in range(400):
        u, i = torch.randint(0, 30, (64,)), torch.randint(0, 30, (64,))
        labels = (user_taste[u] * item_taste[i] > 0).float().unsqueeze(1)  # no sum of a user's and an item's
        output = model["dense"](model["embeddings"](torch.cat([users[u], items[i]]), lengths))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[:10]) / 10 > 0.6
    assert sum(losses[-10:]) / 10 < 0.2


# --- evaluation ---


def test_evaluation_inserts_nothing_and_reads_zeros() -> None:
    ebc = EmbeddingBagCollection({"a": 2, "b": 3}, Adam())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not ebc(VALUES, LENGTHS).any()
    ebc.eval()
    pooled = ebc(VALUES, LENGTHS)
    assert not pooled.any()
    assert not pooled.requires_grad
    assert ebc.stats().num_rows == 0
    trained = ebc.train()(VALUES, LENGTHS)
    assert trained.any()
    assert torch.equal(ebc.eval()(VALUES, LENGTHS), trained)


# --- settings and rows ---


def test_a_learning_rate_changes_the_rest_stays() -> None:
    ebc = from_zero()
    ebc(VALUES, LENGTHS).sum().backward()
    ebc.set_optimizer(SGD(lr=0.5))
    ebc(VALUES, LENGTHS).sum().backward()
    assert read(ebc)[1] == [-1.5] * 5
    with pytest.raises(FailedPreconditionError, match="optimizer.kind"):
        ebc.set_optimizer(Adam())
    assert isinstance(ebc.optimizer, SGD)
    ebc.clear()
    ebc.set_optimizer(Adam())


def test_rows_are_set() -> None:
    ebc = from_zero()
    ids, rows = torch.tensor([3, -1, 3]), torch.tensor([[9.0] * 3, [1, 2, 3], [4, 5, 6]])
    ebc.set_embeddings("b", ids, rows.t().contiguous().t())
    assert read(ebc)[1] == [0, 0, 4, 5, 6]  # the last one of the two for ID 3
    assert ebc.stats().num_rows == 2


def test_setting_rows_begins_their_optimizer_state_anew() -> None:
    new, old = (EmbeddingBagCollection({"a": 2}, Adagrad(lr=0.1)) for _ in range(2))
    values, lengths = torch.tensor([1]), torch.tensor([[1]])
    old(values, lengths).sum().backward()
    for ebc in (new, old):
        ebc.set_embeddings("a", values, torch.ones(1, 2))
        ebc(values, lengths).sum().backward()
    assert torch.equal(new.eval()(values, lengths), old.eval()(values, lengths))


@pytest.mark.parametrize(
    ("slot", "ids", "rows", "error", "named"),
    [
        ("c", VALUES, torch.zeros(3, 2), InvalidArgumentError, "'c' is not one of a, b"),
        ("a", VALUES, torch.zeros(3, 3), InvalidArgumentError, "slot 'a': 3 IDs"),
        ("a", VALUES, torch.zeros(2, 2), InvalidArgumentError, "slot 'a': 3 IDs"),
        ("a", VALUES, torch.zeros(6), InvalidArgumentError, "rows: expected 2 dimension"),
        ("a", VALUES, torch.full((3, 2), torch.inf), InvalidArgumentError, "slot 'a' have a NaN or an inf"),
        ("a", VALUES, torch.zeros(3, 2).double(), InvalidTypeError, "rows is torch.float64"),
        ("a", VALUES, [[0.0, 0.0]], InvalidTypeError, "rows is a list"),
        ("a", VALUES.int(), torch.zeros(3, 2), InvalidTypeError, "ids is torch.int32"),
    ],
)
def test_rows_that_cannot_be_set(slot: str, ids: Any, rows: Any, error: type[Exception], named: str) -> None:
    ebc = from_zero()
    with pytest.raises(error, match=named):
        ebc.set_embeddings(slot, ids, rows)
    assert ebc.stats().num_rows == 0


def test_shared_scaled_and_hashed_slots() -> None:
    slots = SlotsConfig(
        slots_config={
            "item": SlotConfig(dim=1),
            "url": SlotConfig(
                dim=1, hash_stack_config=HashStackConfig(hash_stack_rounds=2, embedding_size=99)
            ),
            "history": SlotConfig(dim=1, sqrt_scaling=True),
        },
        feature_groups={"items": ("item", "history")},
    )
    ebc = EmbeddingBagCollection(slots, SGD(lr=1.0), embedding_config=ZEROS)
    ebc.set_embeddings("item", torch.tensor([5]), torch.tensor([[3.0]]))
    values, lengths = torch.tensor([5, 7, 5, 5, 5, 5]), torch.tensor([[1], [1], [4]])
    pooled = ebc(values, lengths)
    assert pooled.tolist() == [[3, 0, 6]]
    assert ebc.stats().num_rows == 1 + 2
    pooled.sum().backward()
    assert ebc.eval()(values, lengths).tolist() == [[0, -2, 0]]  # 3 - 1 - 4 / 2; each of two rows 0 - 1
    with pytest.raises(InvalidArgumentError, match="slot 'url' has a hash stack"):
        ebc.set_embeddings("url", torch.tensor([5]), torch.tensor([[3.0]]))


def test_equal_seeds_make_equal_rows() -> None:
    def rows(seed: int) -> torch.Tensor:
        config = EmbeddingConfig(seed=seed)
        found: torch.Tensor = EmbeddingBagCollection({"a": 2, "b": 3}, Adam(), embedding_config=config)(
            VALUES, LENGTHS
        )
        return found

    assert torch.equal(rows(1), rows(1))
    assert not torch.equal(rows(1), rows(2))


def test_ids_that_are_not_admitted_read_as_zeros() -> None:
    config = EmbeddingConfig(admit_probability=0.5, weight_bound=0.0)
    ebc = EmbeddingBagCollection({"a": 2}, SGD(lr=1.0), embedding_config=config)
    values, lengths = torch.arange(1000), torch.ones(1, 1000, dtype=torch.int64)
    pooled = ebc(values, lengths)
    stats = ebc.stats()
    assert 400 < stats.num_rows < 600
    assert stats.num_rows + stats.num_unadmitted == 1000
    assert int((pooled == 0).all(dim=1).sum()) == stats.num_unadmitted
    pooled.sum().backward()
    assert (ebc.stats().num_updated, ebc.stats().num_missing) == (stats.num_rows, stats.num_unadmitted)


def test_capacity_evicts_and_refuses_what_never_fits() -> None:
    ebc = from_zero(capacity=4, num_internal_shards=1)
    lengths = torch.tensor([[4], [0]])
    first = ebc(torch.arange(4), lengths)
    ebc(torch.arange(4, 8), lengths)
    first.sum().backward()
    stats = ebc.stats()
    assert (stats.num_rows, stats.num_inserted, stats.num_evicted, stats.num_missing) == (4, 8, 4, 4)
    with pytest.raises(ResourceExhaustedError, match="raise the capacity"):
        ebc(torch.arange(5), torch.tensor([[5], [0]]))


def test_memory_is_reported() -> None:
    ebc = EmbeddingBagCollection({"a": 64}, Adagrad())
    ebc(torch.arange(20_000), torch.tensor([[20_000]]))
    floats = 20_000 * 64 * 2 * 4  # rows and their state
    assert floats < ebc.stats().memory_bytes < 2 * floats


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    config = EmbeddingConfig(emb_initialization=(-1.0, 1.0), weight_bound=10.0, seed=3)
    options: dict[str, Any] = {"embedding_config": config}
    narrow = EmbeddingBagCollection({"a": 64, "b": 64}, SGD(lr=0.1), row_dtype=name, **options)
    wide = EmbeddingBagCollection({"a": 64, "b": 64}, SGD(lr=0.1), **options)
    ids = torch.arange(4000)
    lengths = torch.ones(2, 2000, dtype=torch.int64)
    rows = [ebc(ids, lengths) for ebc in (narrow, wide)]
    assert torch.equal(rows[0], rows[1].to(dtype).float()), "initial values are rounded to nearest"
    for ebc, found in zip((narrow, wide), rows, strict=True):
        found.sum().backward()
        ebc.eval()
    updated, exact = (ebc(ids, lengths) for ebc in (narrow, wide))
    assert torch.equal(updated, updated.to(dtype).float())
    torch.testing.assert_close(updated, exact, rtol=0, atol=2.0 ** (-9 if dtype == torch.float16 else -6))
    saved = (wide.stats().memory_bytes - narrow.stats().memory_bytes) / 4000
    assert 100 < saved < 156, "two bytes an element"


# --- as a module ---


def test_rows_are_no_parameters_and_moving_the_module_moves_nothing() -> None:
    ebc = from_zero()
    assert not list(ebc.parameters())
    assert not list(ebc.buffers())
    assert not ebc.state_dict()
    ebc.double().to("cpu")
    ebc.zero_grad()
    assert ebc(VALUES, LENGTHS).dtype == torch.float32


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_are_refused(copier: Any) -> None:
    model = torch.nn.Sequential(from_zero())
    with pytest.raises(FailedPreconditionError, match="cannot be copied or pickled"):
        copier(model if copier is not copy.copy else model[0])
    with pytest.raises(FailedPreconditionError, match="cannot be copied or pickled"):
        torch.save(model, io.BytesIO())


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"slots": {"a": 0}}, ConfigError, "a.dim=0"),
        ({"slots": {"a": 2.5}}, ConfigError, "a.dim=2.5"),
        ({"slots": {"a": 65537}}, ConfigError, "a.dim=65537"),
        ({"slots": {}}, ConfigError, "no slots"),
        ({"slots": {"": 2}}, ConfigError, "empty name"),
        ({"slots": {1: 2}}, ConfigError, "name 1"),
        ({"slots": ["a"]}, InvalidTypeError, "slots is a list"),
        ({"slots": {"a": SlotConfig(dim=2, embedding_summation=False)}}, InvalidArgumentError, "'a' is raw"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, InvalidTypeError, "torch.optim.sgd.SGD"),
        ({"capacity": 0}, InvalidArgumentError, "capacity=0"),
        ({"capacity": 15}, InvalidArgumentError, "16.*capacity.*15"),
        ({"capacity": 1e9}, InvalidTypeError, "capacity=1000000000.0"),
        ({"num_internal_shards": 0}, InvalidArgumentError, "num_internal_shards=0"),
        ({"num_internal_shards": 65537}, InvalidArgumentError, "num_internal_shards=65537"),
        ({"num_threads": 0}, InvalidArgumentError, "num_threads=0"),
        ({"num_threads": -1}, InvalidArgumentError, "num_threads=-1"),
        ({"num_threads": 100_000}, InvalidArgumentError, "num_threads=100000"),
        ({"num_threads": True}, InvalidTypeError, "num_threads=True"),
        ({"row_dtype": "fp16"}, InvalidArgumentError, "row_dtype is 'fp16'; choose float32"),
        ({"row_dtype": torch.half}, InvalidArgumentError, "row_dtype is 'torch.float16'; choose float32"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        EmbeddingBagCollection(**{"slots": {"a": 2}, "optimizer": SGD(lr=1.0), **options})


def num_system_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_threads_are_those_of_the_argument_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(**options: Any) -> int:
        before = num_system_threads()
        ebc = from_zero(**options)
        made = num_system_threads() - before
        del ebc
        deadline = time.monotonic() + 60
        # They end with the module. The system shows a thread for a moment after it was joined.
        while num_system_threads() != before:
            assert time.monotonic() < deadline, num_system_threads()
            time.sleep(0.01)
        return made + 1  # the caller's

    monkeypatch.delenv("PERSIA_NUM_THREADS", raising=False)
    assert started() == torch.get_num_threads()
    monkeypatch.setenv("PERSIA_NUM_THREADS", "3")
    assert started() == 3
    assert started(num_threads=5) == 5
    monkeypatch.setenv("PERSIA_NUM_THREADS", "100000")
    with pytest.raises(InvalidArgumentError, match="PERSIA_NUM_THREADS=100000"):
        from_zero()


def test_a_fork_is_refused_at_once() -> None:
    ebc = from_zero(num_threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends the child should it hang
        try:
            ebc(VALUES, LENGTHS)
        except FailedPreconditionError as error:
            os._exit(7 if "this process is a fork" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ebc(VALUES, LENGTHS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_inputs_on_another_device() -> None:
    ebc = from_zero()
    pooled = ebc(VALUES.cuda(), LENGTHS.cuda())
    assert pooled.is_cuda
    pooled.sum().backward()
    assert read(ebc)[1] == [-1.0] * 5
