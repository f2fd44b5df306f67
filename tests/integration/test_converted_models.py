"""Converted models whose rows are in real parameter servers: the same loop and results, no lost gradient."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad
from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from persia.nn import convert, export, job_servers, slots_for
from persia.nn.replicas import from_rank_0
from persia.testing import LocalCluster
from tests.rank_group import be_rank, run_ranks

RULE = {"lr": 0.1, "initial_accumulator_value": 0.01}


class Model(nn.Module):
    """Every kind of module: padding, a mean, weights of samples, one used twice, two over one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Embedding(50, 8)
        self.mean = nn.EmbeddingBag(40, 4, mode="mean", padding_idx=1)
        self.tied = nn.EmbeddingBag(50, 8, mode="sum")
        self.tied.weight = self.single.weight
        self.tower = nn.Linear(36, 1)

    def forward(self, ids: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = [
            self.single(ids).sum(1),
            self.single(ids[:, 0]),
            self.mean(bags),
            self.tied(ids),
            self.tied(ids, None, weights),
        ]
        output: torch.Tensor = self.tower(torch.cat(parts, dim=1))
        return output


def batches(seed: int, count: int) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(0, 50, (16, 3), generator=generator)
        bags = torch.randint(0, 40, (16, 2), generator=generator)
        weights = torch.rand(16, 3, generator=generator)
        yield (ids, bags, weights), torch.rand(16, 1, generator=generator)


def train(model: nn.Module, rank: int = 0, count: int = 15) -> list[float]:
    """An ordinary loop, which knows nothing of where rows are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for arguments, labels in batches(10 + rank, count):
        loss = nn.functional.mse_loss(model(*arguments), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def table(model: nn.Module) -> dict[str, Any]:
    """An embedding by itself, of any size, and slots for all models here."""
    return {"Embedding": {"dim": 4}, **slots_for(model)["slots_config"]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    refused = {"summed": {"dim": 4, "sqrt_scaling": True}, "admitting": {"dim": 4, "admit_after": 3}}
    config = {"slots_config": {**table(Model()), **DEEPFM_SLOTS, **refused}}
    with LocalCluster(
        embedding_config=config, parameter_servers=2, env={"PERSIA_DEADLINE_SEC": "60"}
    ) as made:
        yield made


@contextlib.contextmanager
def servers_of(cluster: LocalCluster, **env: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**cluster.env, **env}.items():
            patch.setenv(name, value)
        with job_servers() as connected:
            assert connected is not None
            yield connected


@pytest.fixture
def servers(cluster: LocalCluster) -> Iterator[Any]:
    with servers_of(cluster) as connected:
        connected.backend.clear()
        yield connected


def test_the_same_as_in_one_process(servers: Any) -> None:
    torch.manual_seed(0)
    original = Model()
    local = convert(copy.deepcopy(original), Adagrad(**RULE))
    remote = convert(copy.deepcopy(original), Adagrad(**RULE), servers=servers)
    assert servers.backend.sizes() == pytest.approx([45, 45], abs=20)
    ((arguments, _),) = batches(0, 1)
    torch.testing.assert_close(remote(*arguments), original(*arguments))  # weights were taken over
    torch.testing.assert_close(train(remote), train(local), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(remote.eval()(*arguments), local.eval()(*arguments))
    with torch.no_grad():
        assert torch.equal(export(remote)(*arguments), remote(*arguments))
    counts = servers.counts
    assert counts.rows_missing == counts.nonfinite_slots == 0
    assert counts.gradients_submitted == 0  # that is for contexts
    assert repr(remote.mean.rows) == "StoreRows(40 IDs, dim=4; Adagrad, in parameter servers)"


def imported(name: str) -> Any:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


DEEPFM_SLOTS = {
    f"{part}embedding_dict.{name}": {"dim": dim}
    for part, dim in (("", 4), ("linear_model.", 1))
    for name in ("user", "item")
}


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_deepfm_of_deepctr_torch(servers: Any) -> None:
    imported("deepctr_torch")
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DeepFM

    columns = [
        SparseFeat("user", 100, embedding_dim=4),
        SparseFeat("item", 200, embedding_dim=4),
        VarLenSparseFeat(
            SparseFeat("history", 200, embedding_dim=4, embedding_name="item"), 3, combiner="mean"
        ),
        DenseFeat("age", 1),
    ]
    options = {"l2_reg_linear": 0, "l2_reg_embedding": 0, "init_std": 0.5}
    model = DeepFM(columns, columns, dnn_hidden_units=(16, 8), **options)
    assert slots_for(model)["slots_config"] == DEEPFM_SLOTS
    sides = [
        convert(copy.deepcopy(model), Adagrad(**RULE)),
        convert(copy.deepcopy(model), Adagrad(**RULE), servers=servers),
    ]
    losses: list[list[float]] = [[], []]
    for side, converted in enumerate(sides):
        optimizer = torch.optim.Adam(converted.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(2)
        for _ in range(10):
            ids = torch.randint(0, 100, (32, 5), generator=generator)
            loss = nn.functional.binary_cross_entropy(
                converted(torch.cat([ids, torch.rand(32, 1, generator=generator)], dim=1)),
                (ids[:, 1:2] % 2).float(),
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[side].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def test_evaluation_inserts_nothing_and_training_does(servers: Any) -> None:
    config = EmbeddingConfig(emb_initialization=(0.5, 0.5), weight_bound=0.0)
    model = convert(nn.Embedding(5, 4), SGD(lr=1.0), grow=True, embedding_config=config, servers=servers)
    ids = torch.tensor([2**40, -7])
    assert not model.eval()(ids).any()
    assert sum(servers.backend.sizes()) == 5
    model.train()(ids).sum().backward()
    assert sum(servers.backend.sizes()) == 7
    assert model(ids).tolist() == [[-0.5] * 4] * 2
    with pytest.raises(FailedPreconditionError, match="'' has rows of any IDs.*ids="):
        export(model)
    exported = export(model, ids={"": torch.tensor([2**40, 3, 99])})
    model.eval()
    assert torch.equal(exported(torch.tensor([2**40, 3, 99])), model(torch.tensor([2**40, 3, 99])))
    assert not exported(torch.tensor([4])).any()


def test_a_batch_of_several_messages_is_one_update_of_each_row(servers: Any) -> None:
    original = nn.Embedding(1000, 4)
    ids = torch.arange(150_000) % 1000  # each row in all three messages
    results = []
    for where in (None, servers):
        model = convert(copy.deepcopy(original), Adagrad(**RULE), servers=where)
        model(ids).pow(2).sum().backward()
        results.append(model(torch.arange(1000)).detach())
    torch.testing.assert_close(results[1], results[0])
    empty = torch.empty(0, dtype=torch.int64)
    assert model(empty).shape == (0, 4)


def test_a_learning_rate_reaches_the_servers(servers: Any) -> None:
    rule = SGD(lr=1.0)
    model = convert(nn.Embedding(5, 4), rule, servers=servers)
    before = model(torch.tensor([1])).detach()
    rule.set_lr(0.25)
    model(torch.tensor([1])).sum().backward()
    torch.testing.assert_close(model(torch.tensor([1])), before - 0.25)


def test_lookups_without_a_gradient_are_given_up(servers: Any) -> None:
    model = convert(nn.Embedding(5, 4), SGD(lr=1.0), servers=servers)
    loss = model(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(FailedPreconditionError, match="updated already"):
        loss.backward()
    for _ in range(3):
        model(torch.tensor([1]))
    gc.collect()
    wait_for_released(servers, 3)
    assert servers.counts.batches_trained == 1


def wait_for_released(servers: Any, count: int) -> None:
    deadline = time.monotonic() + 120
    while servers.counts.batches_released < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interrupted_backward_gives_its_lookup_up(servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    model = convert(nn.Embedding(5, 4), SGD(lr=1.0), servers=servers)
    loss = model(torch.tensor([1])).sum()
    with monkeypatch.context() as patch:
        patch.setattr(servers.backend, "return_gradients", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    wait_for_released(servers, 1)


def test_dump_and_load(servers: Any, tmp_path: Path) -> None:
    model = convert(nn.Embedding(20, 4), SGD(lr=1.0), servers=servers)
    before = model(torch.arange(20)).detach()
    servers.dump(tmp_path / "rows")
    model(torch.arange(20)).sum().backward()
    assert not torch.equal(model(torch.arange(20)), before)
    servers.load(tmp_path / "rows")
    assert torch.equal(model(torch.arange(20)), before)
    for refused in (model.rows.stats, model.rows.clear, lambda: model.rows.dump(tmp_path / "other")):
        with pytest.raises(FailedPreconditionError, match="in parameter servers"):
            refused()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.ModuleDict({"unknown": nn.Embedding(5, 4)}), "has no slot 'unknown': write slots_config.unknown"),
        (nn.ModuleDict({"single": nn.Embedding(5, 3)}), "has the slot 'single' with dim=8"),
        (nn.ModuleDict({"summed": nn.Embedding(5, 4)}), "'summed' pooled by something else"),
    ],
)
def test_slots_that_do_not_fit_are_named_and_nothing_is_changed(
    servers: Any, model: nn.Module, reason: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        convert(model, SGD(lr=1.0), servers=servers)
    assert sum(servers.backend.sizes()) == 0
    assert all(isinstance(child, nn.Embedding) for child in model.children())


@pytest.mark.parametrize(
    ("optimizer", "config"),
    [(SGD(lr=0.5), {}), (Adagrad(**RULE), {}), (SGD(lr=1.0), {"weight_bound": 0.5})],
)
def test_one_optimizer_for_all_rows_of_a_job(servers: Any, optimizer: Any, config: Any) -> None:
    model = convert(nn.Embedding(5, 4), SGD(lr=1.0), servers=servers)
    convert(nn.ModuleDict({"mean": nn.Embedding(5, 4)}), SGD(lr=1.0), servers=servers)
    before = model(torch.arange(5)).detach()
    other = nn.ModuleDict({"mean": nn.Embedding(50, 4)})
    config = EmbeddingConfig(**{"weight_bound": 0.0, **config})
    with pytest.raises(InvalidArgumentError, match="another optimizer.*a job has one"):
        convert(other, optimizer, embedding_config=config, servers=servers)
    assert isinstance(other["mean"], nn.Embedding)
    assert sum(servers.backend.sizes()) == 10
    model(torch.arange(5)).sum().backward()
    torch.testing.assert_close(model(torch.arange(5)), before - 1)


def test_admission_by_batches_is_refused(servers: Any) -> None:
    config = EmbeddingConfig(admit_after=2)
    with pytest.raises(InvalidArgumentError, match="admit_after=2"):
        convert(nn.Embedding(5, 4), SGD(lr=1.0), embedding_config=config, servers=servers)
    with pytest.raises(InvalidArgumentError, match="the slot 'admitting' with admit_after=3"):
        convert(nn.ModuleDict({"admitting": nn.Embedding(5, 4)}), SGD(lr=1.0), servers=servers)
    assert sum(servers.backend.sizes()) == 0


def test_after_the_block_the_model_says_so(cluster: LocalCluster) -> None:
    with servers_of(cluster) as servers:
        model = convert(nn.Embedding(5, 4), SGD(lr=1.0), servers=servers)
    with pytest.raises(FailedPreconditionError, match="is closed"):
        model(torch.tensor([1]))


def test_without_a_job_there_are_no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_NATS_URL", raising=False)
    with job_servers() as servers:
        assert servers is None
        model = convert(nn.Embedding(5, 4), SGD(lr=1.0), servers=servers)
    assert model.rows.stats().num_rows == 5


def test_rows_that_do_not_fit_into_the_servers_are_an_error() -> None:
    config = {"slots_config": {"Embedding": {"dim": 4}}}
    limits = {"embedding_parameter_server_config": {"capacity": 100, "num_hashmap_internal_shards": 1}}
    with LocalCluster(embedding_config=config, global_config=limits) as cluster:
        reason = "capacity is too small for 'Embedding': 100 of 200"
        with servers_of(cluster) as servers, pytest.raises(InvalidArgumentError, match=reason):
            convert(nn.Embedding(200, 4), SGD(lr=1.0), servers=servers)


def test_a_gradient_that_cannot_be_applied_is_an_error_of_backward() -> None:
    """A server dies after the lookup. A worker that restarts after it loses nothing."""
    config = {"slots_config": {"Embedding": {"dim": 4}}}
    # The deadline is that of this process alone: servers may take longer to find each other.
    with (
        LocalCluster(embedding_config=config, parameter_servers=2) as cluster,
        servers_of(cluster, PERSIA_DEADLINE_SEC="10") as servers,
    ):
        model = convert(nn.Embedding(50, 4), SGD(lr=1.0), servers=servers)
        ids = torch.arange(50)
        before = model(ids).detach()
        loss = model(ids).sum()
        cluster.restart("embedding-worker-0")
        loss.backward()  # its successor applies the gradient
        assert torch.equal(model.eval()(ids), before - 1.0)
        loss = model.train()(ids).sum()
        cluster.kill("embedding-parameter-server-1")
        # Beside other work the live server may miss the short deadline too, and is then named first.
        with pytest.raises(
            (UnavailableError, DeadlineExceededError), match=r"'Embedding'.*parameter.server.[01]"
        ):
            loss.backward(retain_graph=True)
        with pytest.raises(FailedPreconditionError, match="partly, updated by a backward that failed"):
            loss.backward()
        with pytest.raises((UnavailableError, DeadlineExceededError), match=r"parameter.server.1"):
            model(ids)


# --- two ranks ---


def rank_trains(rank: int) -> None:
    """Beside the original under DDP; what both ranks and the servers end with is one set of rows."""
    torch.manual_seed(rank)  # rank 0's values become everybody's
    original = Model()
    with job_servers() as servers:
        converted = Model()
        converted.load_state_dict(original.state_dict())
        convert(converted, Adagrad(**RULE), process_group=dist.group.WORLD, servers=servers)
        reference = DistributedDataParallel(original)
        weights = [original.single.weight, original.mean.weight]
        rows = torch.optim.Adagrad(weights, lr=RULE["lr"], initial_accumulator_value=0.01)
        dense = torch.optim.SGD(original.tower.parameters(), lr=0.1)
        expected = []
        for arguments, labels in batches(10 + rank, 15):
            loss = nn.functional.mse_loss(reference(*arguments), labels)
            for optimizer in (rows, dense):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (rows, dense):
                optimizer.step()
            expected.append(loss.item())
        losses = train(DistributedDataParallel(converted), rank)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        converted.eval()
        found = [converted.single.rows.read(torch.arange(50)), converted.mean.rows.read(torch.arange(40))]
        torch.testing.assert_close(found, [weight.detach() for weight in weights])


def rank_loads(rank: int) -> None:
    """Whichever rank is slow: rows are there when `convert` ends, and stay what is loaded then."""
    rule, group, ids = Adagrad(**RULE), dist.group.WORLD, torch.arange(50)
    with job_servers() as servers, tempfile.TemporaryDirectory() as folder:
        with slow_writes(servers, is_slow=rank == 0):
            torch.manual_seed(rank)
            original = Model()
            expected = from_rank_0(original.single.weight, group)
            model = convert(original, rule, process_group=group, servers=servers)
        assert torch.equal(model.single.rows.read(ids), expected)
        if rank == 0:
            servers.dump(folder)
        dist.barrier()
        with slow_writes(servers, is_slow=rank == 1):
            other = convert(Model(), rule, process_group=group, servers=servers)
        if rank == 0:
            servers.load(folder)
        dist.barrier()
        assert torch.equal(other.single.rows.read(ids), expected)
        padded = nn.Embedding(5, 4, padding_idx=1)
        nn.init.normal_(padded.weight)
        expected = from_rank_0(padded.weight[1], group)
        assert torch.equal(convert(padded, rule, process_group=group, servers=servers).padding_row, expected)


@contextlib.contextmanager
def slow_writes(servers: Any, *, is_slow: bool) -> Iterator[None]:
    write = servers.backend.set_embeddings

    def slowly(*rows: Any) -> None:
        time.sleep(0.5)
        write(*rows)

    with pytest.MonkeyPatch.context() as patch:
        if is_slow:
            patch.setattr(servers.backend, "set_embeddings", slowly)
        yield


def rank_fails(rank: int) -> None:
    """Rank 0 cannot write the weights, rank 1 apply its share: both raise, and neither is left waiting."""

    def failing(*rows: Any) -> None:
        raise UnavailableError("the server is gone")

    with job_servers() as servers:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(servers.backend, "set_embeddings", failing)
            with pytest.raises(UnavailableError) as caught:
                convert(Model(), SGD(lr=0.1), process_group=dist.group.WORLD, servers=servers)
        assert ("the server is gone" if rank == 0 else "rank 0 could not update") in str(caught.value)
        model = convert(Model(), SGD(lr=0.1), process_group=dist.group.WORLD, servers=servers)
        ((arguments, _),) = batches(rank, 1)
        loss = model(*arguments).sum()
        if rank == 1:
            servers.close()
        with pytest.raises(UnavailableError if rank == 0 else FailedPreconditionError) as caught:
            loss.backward()
        assert ("rank 1 could not update" if rank == 0 else "is closed") in str(caught.value)


CASES = {case.__name__: case for case in (rank_trains, rank_loads, rank_fails)}


@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks(case: str, servers: Any, tmp_path: Path) -> None:
    run_ranks(__file__, case, tmp_path)


if __name__ == "__main__":
    be_rank(CASES, *sys.argv[1:])
