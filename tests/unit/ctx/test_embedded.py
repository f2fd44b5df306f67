"""Embedded jobs: what a context builds without a broker, how loaders find it, and what is shared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from persia.config import parse_embedding_config
from persia.ctx import DataCtx, EmbeddingCtx, PreprocessMode, TrainCtx, cnt_ctx, eval_ctx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import (
    ConfigError,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    StreamClosedError,
    UnavailableError,
)
from persia.job.embedded import find_embedded_job

SLOTS = {"slots_config": {"a": {"dim": 4}, "b": {"dim": 4}}}


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_DEADLINE_SEC", "20")
    monkeypatch.delenv("PERSIA_EMBEDDING_CONFIG", raising=False)


@pytest.fixture
def train_ctx() -> Callable[..., TrainCtx]:
    def make(**kwargs: Any) -> TrainCtx:
        model = torch.nn.Linear(9, 1)
        arguments = {
            "model": model,
            "embedding_optimizer": SGD(lr=0.1),
            "dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "mixed_precision": False,
            "slots": SLOTS,
        }
        return TrainCtx(**{**arguments, **kwargs})

    return make


def run(ctx: TrainCtx, loader: DataLoader) -> list[bytes | None]:
    """Trains on everything; returns the batches' metas."""
    metas = []
    for batch in loader:
        metas.append(batch.meta)
        _, embeddings, _ = ctx.prepare_features(batch)
        ctx.backward(torch.cat(embeddings).sum())
    return metas


@pytest.fixture
def feeder(new_batch: Any) -> Callable[..., Callable[[], None]]:
    """`feeder(n, **data_ctx_arguments)`: a loader function that sends n batches."""

    def make(num_batches: int, **kwargs: Any) -> Callable[[], None]:
        def feed() -> None:
            with DataCtx(**kwargs) as ctx:
                for number in range(num_batches):
                    ctx.send_data(new_batch(number * ctx.replica_size + ctx.replica_index))

        return feed

    return make


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], Any]], threading.Thread]]:
    """Runs functions on threads; the test fails with what they raise."""
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def start(function: Callable[[], Any]) -> threading.Thread:
        def body() -> None:
            try:
                function()
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=body))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == []


def test_a_loader_function_feeds_the_stream(train_ctx: Any, feeder: Any, log: Any) -> None:
    with train_ctx() as ctx:
        metas = run(ctx, DataLoader(StreamingDataset(loader=feeder(12)), reproducible=True))
    assert metas == [str(number).encode() for number in range(12)]
    assert ctx.counters.batches_trained == 12
    assert sum("embedded mode" in record.getMessage() for record in log.records) == 1


def test_what_is_no_batch_is_refused_and_leaves_no_gap(train_ctx: Any, new_batch: Any) -> None:
    def load() -> None:
        with DataCtx() as data:
            with pytest.raises(InvalidTypeError, match="takes a PersiaBatch, not int"):
                data.send_data(5)  # type: ignore[arg-type]
            data.send_data(new_batch(0))

    with train_ctx() as ctx:
        assert len(run(ctx, DataLoader(StreamingDataset(loader=load)))) == 1


@pytest.mark.parametrize("first", ["loader", "trainer"])
def test_a_loader_on_a_thread_may_start_before_or_after(
    train_ctx: Any, feeder: Any, in_thread: Any, first: str
) -> None:
    if first == "loader":
        in_thread(feeder(5))
        time.sleep(0.2)
    with train_ctx() as ctx:
        if first == "trainer":
            in_thread(feeder(5))
        assert len(run(ctx, DataLoader(StreamingDataset()))) == 5


def test_several_loaders_share_the_stream(train_ctx: Any, feeder: Any, in_thread: Any) -> None:
    with train_ctx() as ctx:
        for index in range(3):
            in_thread(feeder(4, replica_index=index, replica_size=3))
        metas = run(ctx, DataLoader(StreamingDataset(), reproducible=True))
    assert metas == [str(number).encode() for number in range(12)]


def test_cells_of_a_notebook_may_send_first_and_train_then(train_ctx: Any, new_batch: Any) -> None:
    ctx = train_ctx().__enter__()
    data = DataCtx().__enter__()
    assert cnt_ctx() is data
    batches = iter(DataLoader(StreamingDataset()))
    sent = threading.Thread(target=lambda: [data.send_data(new_batch(n)) for n in range(3)])
    sent.start()
    for _ in range(3):
        _, embeddings, _ = ctx.prepare_features(next(batches))
        ctx.backward(torch.cat(embeddings).sum())
    sent.join()
    data.__exit__(None, None, None)
    with pytest.raises(StopIteration):
        next(batches)
    ctx.__exit__(None, None, None)
    assert ctx.counters.batches_trained == 3


def test_contexts_one_after_the_other_share_nothing(train_ctx: Any, new_batch: Any) -> None:
    for _ in range(2):
        with train_ctx() as ctx:
            assert sum(ctx.get_embedding_size()) == 0
            ctx.prepare_features(ctx.get_embedding_from_data(new_batch(9)))
            assert sum(ctx.get_embedding_size()) == 8


def test_contexts_side_by_side_share_nothing(train_ctx: Any, feeder: Any, in_thread: Any) -> None:
    metas: dict[int, list[bytes | None]] = {}
    together = threading.Barrier(2)

    def job(num_batches: int) -> None:
        with train_ctx() as ctx:
            together.wait(120)
            loader = DataLoader(StreamingDataset(loader=feeder(num_batches)), reproducible=True)
            metas[num_batches] = run(ctx, loader)
            together.wait(120)
            assert sum(ctx.get_embedding_size()) == 2 * max(3, num_batches)

    in_thread(lambda: job(7))
    in_thread(lambda: job(11)).join(120)
    for num_batches in (7, 11):
        assert metas[num_batches] == [str(number).encode() for number in range(num_batches)]


def test_two_jobs_need_to_be_told_apart(train_ctx: Any, feeder: Any, in_thread: Any) -> None:
    one, other = train_ctx(), train_ctx()
    try:
        with pytest.raises(FailedPreconditionError, match=r"2 embedded contexts .*DataCtx\(to=ctx\)"):
            DataCtx()
        with one:
            in_thread(feeder(3, to=one))
            assert len(run(one, DataLoader(StreamingDataset()))) == 3
    finally:
        other.__exit__(None, None, None)


def test_nested_contexts_share_rows_and_slots(train_ctx: Any, new_batch: Any) -> None:
    with train_ctx() as ctx:
        ctx.prepare_features(ctx.get_embedding_from_data(new_batch(1)))
        with eval_ctx(model=ctx.model) as evaluation:
            assert evaluation.get_embedding_size() == ctx.get_embedding_size()
            with pytest.raises(FailedPreconditionError, match="no embedded job of its own"):
                DataCtx(to=evaluation)


def test_evaluation_on_another_thread_sees_the_training(
    train_ctx: Any, new_batch: Any, in_thread: Any
) -> None:
    with train_ctx() as ctx:
        ctx.prepare_features(ctx.get_embedding_from_data(new_batch(1)))
        sizes: list[list[int]] = []

        def evaluate() -> None:
            with eval_ctx() as evaluation:
                sizes.append(evaluation.get_embedding_size())

        in_thread(evaluate).join()
        assert sizes == [ctx.get_embedding_size()]


def test_error_of_the_loader_is_raised_in_the_loop(train_ctx: Any, new_batch: Any) -> None:
    def feed() -> None:
        with DataCtx() as data:
            data.send_data(new_batch(0))
            raise ZeroDivisionError("row 17")

    with train_ctx():
        batches = iter(DataLoader(StreamingDataset(loader=feed)))
        assert next(batches).meta == b"0"
        with pytest.raises(UnavailableError, match="ZeroDivisionError: row 17"):
            next(batches)


@pytest.mark.parametrize(
    ("loader", "error", "match"),
    [
        (lambda: 1 / 0, UnavailableError, "the data loader ended with an error: ZeroDivisionError"),
        (lambda: None, FailedPreconditionError, "ended without a DataCtx"),
    ],
)
def test_loader_that_never_sends_does_not_hang_the_loop(
    train_ctx: Any, loader: Any, error: type[Exception], match: str
) -> None:
    with train_ctx(), pytest.raises(error, match=match):
        next(iter(DataLoader(StreamingDataset(loader=loader))))


def test_leaving_the_loop_early_ends_the_loader(train_ctx: Any, new_batch: Any) -> None:
    ended = threading.Event()
    errors = []

    def feed() -> None:
        try:
            with DataCtx() as data:
                for number in range(100_000):
                    data.send_data(new_batch(number))
        except StreamClosedError as error:
            errors.append(error)
        finally:
            ended.set()

    with train_ctx() as ctx:
        for batch in DataLoader(StreamingDataset(loader=feed)):
            ctx.backward(ctx.prepare_features(batch)[1][0].sum())
            break
    assert ended.wait(120)
    assert errors == []


def test_slots_come_from_a_file_a_mapping_an_object_or_the_environment(
    train_ctx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_batch: Any
) -> None:
    path = tmp_path / "slots.yml"
    path.write_text(yaml.safe_dump(SLOTS))
    for given in (path, str(path), SLOTS, parse_embedding_config(SLOTS)):
        with train_ctx(slots=given) as ctx:
            ctx.prepare_features(ctx.get_embedding_from_data(new_batch(1)))
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(path))
    with train_ctx(slots=None) as ctx:
        ctx.prepare_features(ctx.get_embedding_from_data(new_batch(1)))


def test_global_config_bounds_the_store(train_ctx: Any, new_batch: Any) -> None:
    small = {"embedding_parameter_server_config": {"capacity": 5, "num_hashmap_internal_shards": 1}}
    with train_ctx(global_config=small) as ctx:
        ctx.get_embedding_from_data(new_batch(9))
        assert ctx.get_embedding_size() == [5]


def test_global_config_chooses_the_type_of_rows(train_ctx: Any, new_batch: Any) -> None:
    def embeddings(dtype: str) -> torch.Tensor:
        with train_ctx(
            embedding_config=EmbeddingConfig(seed=1),
            global_config={"embedding_parameter_server_config": {"row_dtype": dtype}},
        ) as ctx:
            _, tensors, _ = ctx.prepare_features(ctx.get_embedding_from_data(new_batch(9)))
            return torch.cat([tensor.flatten() for tensor in tensors]).detach()

    rows = embeddings("float32")
    assert not torch.equal(rows, rows.bfloat16().float())
    narrow = embeddings("bfloat16")
    assert not torch.equal(narrow, rows)
    # Sums of two rows, whose elements are at most 0.01 and rounded to nearest.
    torch.testing.assert_close(narrow, rows, rtol=0, atol=2 * 0.01 * 2**-9)


def test_what_cannot_be_embedded_is_refused(
    train_ctx: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="slots_config"):
        train_ctx(slots={"slots": {}})
    with pytest.raises(ConfigError, match="there is no such file"):
        train_ctx(slots=tmp_path / "missing.yml")
    with pytest.raises(InvalidArgumentError, match="replica_index=2 and replica_size=2"):
        DataCtx(replica_index=2, replica_size=2)
    with pytest.raises(InvalidTypeError, match="loader is a str"):
        StreamingDataset(loader="loader.py")  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    from persia import env

    env.reload_env()
    with pytest.raises(FailedPreconditionError, match="WORLD_SIZE is 2 and there are no servers"):
        train_ctx()


def test_inference_without_a_cluster_reads_zeros_and_inserts_nothing(new_batch: Any) -> None:
    with EmbeddingCtx(PreprocessMode.INFERENCE, slots=SLOTS) as ctx:
        batch = ctx.get_embedding_from_data(new_batch(1))
        assert not torch.cat(batch.consume_all_id_type_feature_embedding_tensors()).any()
        assert sum(ctx.get_embedding_size()) == 0


def test_a_stream_without_a_loader_says_what_is_missing(
    train_ctx: Any, in_thread: Any, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    monkeypatch.setenv("PERSIA_LOADER_SILENCE_SEC", "0.04")
    monkeypatch.setattr("persia.pipeline.loader_watch._REPORT_INTERVAL_S", 0.0)
    missing = "in one process, pass StreamingDataset(loader=...) or run a DataCtx on another thread"

    def end_when_told() -> None:
        while not any(missing in text for text in log.messages):
            time.sleep(0.01)
        with DataCtx(to=ctx):
            pass

    with train_ctx() as ctx:
        in_thread(end_when_told)
        assert run(ctx, DataLoader(StreamingDataset(), timeout_ms=60_000)) == []
    assert f"waiting for the first batch of the data loaders; {missing}" in log.messages


def test_a_job_that_cannot_start_is_not_found_by_loaders(train_ctx: Callable[..., TrainCtx]) -> None:
    packets = {"enable_incremental_update": True, "incremental_dir": "nosuch://x/y"}
    with pytest.raises(InvalidArgumentError, match="nosuch"):
        train_ctx(global_config={"embedding_parameter_server_config": packets})
    with train_ctx() as ctx:
        assert find_embedded_job() is ctx.runtime.embedded  # it would not know which of two jobs is meant
