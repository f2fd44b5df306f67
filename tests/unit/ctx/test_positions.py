"""A job that ends after a checkpoint and is resumed trains each batch once, with any number of loaders."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from persia.ctx import DataCtx, TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import FailedPreconditionError
from persia.messaging.payloads import SubmittedBatch
from persia.pipeline.position import DataPosition
from persia.pipeline.receive import Inbox, Offer

TOTAL = 40
SLOTS = {"feature_index_prefix_bit": 8, "slots_config": {"a": {"dim": 4}, "b": {"dim": 4}}}


def run(
    model: torch.nn.Module,
    new_batch: Callable[[int], Any],
    *,
    loaders: int,
    resume: bool = True,
    load: Path | None = None,
    dump: Path | None = None,
    dump_after: int = 0,
    before_dump: Callable[[], Any] = lambda: None,
) -> list[int]:
    """Returns what was trained before the dump; all, if there is none. Two batches follow a dump.

    What `before_dump` returns is held during the dump.
    """

    def feed(index: int) -> None:
        with DataCtx(replica_index=index, replica_size=loaders) as data:
            first = data.resume() if resume else 0
            for number in range(first * loaders + index, TOTAL, loaders):
                data.send_data(new_batch(number))

    def feed_all() -> None:
        others = [threading.Thread(target=feed, args=(index,)) for index in range(1, loaders)]
        for thread in others:
            thread.start()
        feed(0)
        for thread in others:
            thread.join()

    numbers = list[int]()
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.1, 0.1)),
        slots=SLOTS,
        mixed_precision=False,
    ) as ctx:
        if load is not None:
            ctx.load_checkpoint(load)
        for batch in DataLoader(StreamingDataset(loader=feed_all)):
            numbers.append(int(batch.meta or b""))
            output, _ = ctx.forward(batch)
            ctx.backward(output.mean())
            del batch
            if dump is not None and len(numbers) == dump_after:
                held = before_dump()
                ctx.dump_checkpoint(dump)
                del held
            if dump is not None and len(numbers) == dump_after + 2:
                break
    return numbers[:dump_after] if dump is not None else numbers


def test_each_batch_is_trained_once_with_any_number_of_loaders(
    model: torch.nn.Module, new_batch: Callable[[int], Any], tmp_path: Path
) -> None:
    first = run(model, new_batch, loaders=2, dump=tmp_path / "1", dump_after=13)
    second = run(model, new_batch, loaders=3, load=tmp_path / "1", dump=tmp_path / "2", dump_after=7)
    third = run(model, new_batch, loaders=1, load=tmp_path / "2")
    assert sorted(first + second + third) == list(range(TOTAL))
    # Loaders that do not resume train the model on with other data: nothing of it may be left out.
    other = run(model, new_batch, loaders=2, load=tmp_path / "2", resume=False)
    assert sorted(other) == list(range(TOTAL))


def test_batches_of_another_data_set_are_not_in_the_position(
    model: torch.nn.Module, new_batch: Callable[[int], Any], make_dataset: Any, tmp_path: Path
) -> None:
    def begin_another() -> Any:
        batches = iter(DataLoader(make_dataset(2)))
        return batches, next(batches)  # its batch_id is 0, and it is not trained

    dump = tmp_path / "1"
    first = run(model, new_batch, loaders=1, dump=dump, dump_after=13, before_dump=begin_another)
    second = run(model, new_batch, loaders=2, load=dump)
    assert sorted(first + second) == list(range(TOTAL))


def test_some_loaders_that_resume_beside_others_are_refused() -> None:
    inbox = Inbox(0, 1, 4, ordered=False, trained=DataPosition(((5, 4),)))
    assert inbox.received(0, 2, resume=True) == 6
    with pytest.raises(FailedPreconditionError, match="data loader 1 does not call DataCtx"):
        inbox.received(1, 2, resume=False)
    batch = SubmittedBatch(6, 9, 1, 0, 0, 2, True, b"")
    assert inbox.offer(batch, hold_s=0.0) is Offer.QUEUED


def test_positions_are_sets_that_survive_other_numbers() -> None:
    position = DataPosition().joined([5, 2])  # 0, 2, 4 of one loader, 1 of the other
    assert [n for n in range(10) if n in position] == [0, 1, 2, 4]
    assert [position.first_missing(index, 2) for index in range(2)] == [3, 1]
    assert position.first_missing(0, 1) == 3
    later = position.joined([7])
    assert [n for n in range(10) if n in later] == list(range(7))
    assert later == DataPosition(((7,),)), "a stripe that a later one covers is left out"


@pytest.mark.parametrize("stripes", [(), ((5,),), ((6, 2),), ((9, 4, 7), (3, 8)), ((2, 0),)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("end", [0, 1, 6, 23])
def test_missing_numbers_are_counted(stripes: Any, replicas: int, end: int) -> None:
    position = DataPosition(stripes)
    for index in range(replicas):
        missing = [number for number in range(index, end, replicas) if number not in position]
        assert position.count_missing(index, replicas, end) == len(missing)
