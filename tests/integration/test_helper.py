"""Jobs around a block of Python: functions as processes, and their failures in the caller."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from persia.ctx import DataCtx, TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import ConfigError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from persia.helper import PersiaServiceCtx, ensure_persia_service

SLOTS = {"slots_config": {"user": {"dim": 4}}}
NUM_BATCHES = 20


def load() -> None:
    with DataCtx() as ctx:
        for number in range(NUM_BATCHES):
            ids = np.arange(number, number + 8, dtype=np.uint64)
            ctx.send_data(
                PersiaBatch(
                    [IDTypeFeatureWithSingleID("user", ids)], labels=[Label(np.ones((8, 1), np.float32))]
                )
            )


def train() -> int:
    """Number of batches trained."""
    model = torch.nn.Linear(4, 1)
    with TrainCtx(
        SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), model=model, mixed_precision=False
    ) as ctx:
        for batch in DataLoader(StreamingDataset()):
            _, (user,), labels = ctx.prepare_features(batch)
            assert ctx.model is not None
            ctx.backward((ctx.model(user) - (labels or [])[0]).square().mean())
    return ctx.counters.batches_trained


def writing_to(path: Path) -> Any:
    """A closure, as a notebook has it: it travels by value."""

    def nn_worker() -> None:
        num_trained = train()
        with path.with_suffix(f".{os.environ['RANK']}").open("w") as file:
            json.dump(num_trained, file)

    return nn_worker


def persia_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PERSIA_")}


def test_the_caller_trains_what_the_loader_function_sends() -> None:
    before = persia_variables()
    with ensure_persia_service(data_loader_func=load, embedding_config=SLOTS) as service:
        assert os.environ["PERSIA_NATS_URL"] == service.nats_url
        assert train() == NUM_BATCHES
    assert persia_variables() == before


def test_loaders_of_their_own_processes_feed_an_embedded_context() -> None:
    with PersiaServiceCtx(
        load,
        embedding_config=SLOTS,
        data_loader_replica_num=2,
        embedding_worker_replica_num=0,
        embedding_parameter_replica_num=0,
    ) as service:
        assert train() == 2 * NUM_BATCHES
        names = {process.name for process in service._cluster.processes}
    assert names == {"nats", "data-loader-0", "data-loader-1"}


def test_bug_19_functions_as_processes_configured_by_files(tmp_path: Path) -> None:
    slots, settings = tmp_path / "slots.yml", tmp_path / "global.yml"
    slots.write_text(yaml.safe_dump(SLOTS))
    settings.write_text(yaml.safe_dump({"embedding_parameter_server_config": {"capacity": 1000}}))
    with PersiaServiceCtx(
        load,
        writing_to(tmp_path / "trained"),
        embedding_config_path=slots,
        global_config_path=settings,
        data_loader_replica_num=2,
        nproc_per_node=2,
        embedding_parameter_replica_num=2,
    ) as service:
        service.wait(240.0)
    trained = [json.loads((tmp_path / f"trained.{rank}").read_text()) for rank in range(2)]
    assert trained == [NUM_BATCHES, NUM_BATCHES]


def fail() -> None:
    raise ZeroDivisionError("row 17")


@pytest.mark.parametrize("failing", ["data_loader_func", "nn_worker_func"])
def test_error_of_a_function_ends_the_block(failing: str) -> None:
    has_slept = False

    def block() -> None:
        nonlocal has_slept
        with ensure_persia_service(embedding_config=SLOTS, **{failing: fail}):
            time.sleep(200)
            has_slept = True

    name = {"data_loader_func": "data-loader-0", "nn_worker_func": "nn-worker"}[failing]
    with pytest.raises(UnavailableError, match=f"(?s){name} ended with exit code 1:.*row 17"):
        block()
    assert not has_slept


def load_what_is_broken() -> None:
    with DataCtx() as ctx:
        ids = IDTypeFeatureWithSingleID("user", np.arange(8, dtype=np.uint64))
        ctx.send_data(PersiaBatch([ids], labels=[Label(np.ones((8, 1), np.float32))]))
        fail()


def test_a_loader_that_fails_is_shown_with_its_traceback() -> None:
    """The caller's training ends first, by what the loader tells its ranks."""
    with (
        pytest.raises(UnavailableError, match=r"(?s)data-loader-0 ended .*in fail\n.*row 17"),
        PersiaServiceCtx(load_what_is_broken, embedding_config=SLOTS),
    ):
        train()


def test_an_error_of_the_block_is_the_cause_of_the_failure_unless_it_is_the_failure() -> None:
    service = PersiaServiceCtx(embedding_config=SLOTS)  # nothing runs: this is about the block's end
    service._failure = failure = UnavailableError("row 17")
    service._failed.set()
    service.__exit__(UnavailableError, failure, None)
    assert failure.__cause__ is None
    own = UnavailableError("the stream ended with an error")
    with pytest.raises(UnavailableError, match="row 17") as caught:
        service.__exit__(UnavailableError, own, None)
    assert caught.value.__cause__ is own


def test_bug_19_server_that_dies_ends_the_block() -> None:
    def block() -> None:
        with PersiaServiceCtx(embedding_config=SLOTS) as service:
            service._cluster.kill("embedding-worker-0")
            time.sleep(200)

    with pytest.raises(UnavailableError, match=r"embedding-worker-0 ended with exit code -9"):
        block()


def test_off_the_main_thread_the_failure_comes_at_the_end() -> None:
    errors: list[BaseException] = []

    def block() -> None:
        try:
            with PersiaServiceCtx(embedding_config=SLOTS, nn_worker_func=fail):
                pass
        except UnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=block)
    thread.start()
    thread.join(240)
    assert "row 17" in str(errors[0])


def test_error_of_the_block_is_its_own() -> None:
    with pytest.raises(KeyError, match="mine"), PersiaServiceCtx(embedding_config=SLOTS):
        raise KeyError("mine")


def test_waiting_has_an_end() -> None:
    with (
        pytest.raises(DeadlineExceededError, match="still runs after 0.5 s"),
        PersiaServiceCtx(embedding_config=SLOTS, nn_worker_func=lambda: time.sleep(100)) as service,
    ):
        service.wait(0.5)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ConfigError, "pass embedding_config or embedding_config_path"),
        ({"embedding_config": SLOTS, "embedding_config_path": "a.yml"}, InvalidArgumentError, "both given"),
        ({"embedding_config": {}}, ConfigError, "slots_config"),
        ({"embedding_config_path": "missing.yml"}, ConfigError, "no such file"),
        ({"embedding_config": SLOTS, "nproc_per_node": 0}, InvalidArgumentError, "nproc_per_node is 0"),
        (
            {"embedding_config": SLOTS, "embedding_worker_replica_num": 0},
            InvalidArgumentError,
            "embedding_worker_replica_num is 0",
        ),
        (
            {
                "embedding_config": SLOTS,
                "embedding_worker_replica_num": 0,
                "embedding_parameter_replica_num": 0,
                "nproc_per_node": 2,
            },
            InvalidArgumentError,
            "each would train embeddings of its own",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        PersiaServiceCtx(**arguments)
