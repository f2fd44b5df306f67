"""`TrainCtx(recovery=...)`: a job that is started again continues after its newest checkpoint by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from persia.ctx import DataCtx, Recovery, TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError
from persia.pipeline.position import DataPosition
from persia.storage.location import Location
from persia.storage.manifest import Manifest

TOTAL = 25
SLOTS = {"feature_index_prefix_bit": 8, "slots_config": {"a": {"dim": 4}, "b": {"dim": 4}}}


class KilledError(Exception):
    """Stands for the end of the process."""


class Script:
    """One training script, started again and again: it has a scheduler, and knows nothing of recovery."""

    def __init__(self, new_batch: Callable[[int], Any], make_model: Callable[[], torch.nn.Module]) -> None:
        self._new_batch, self._make_model = new_batch, make_model
        self.counters: Any = None
        self.between: Callable[[TrainCtx], None] = lambda ctx: None
        self.resumes = True

    def _feed(self) -> None:
        with DataCtx() as data:
            for number in range(data.resume() if self.resumes else 0, TOTAL):
                data.send_data(self._new_batch(number))

    def run(self, directory: Path, *, kill_at: int = -1, accumulate: int = 1, **settings: Any) -> list[int]:
        """The numbers that were trained; `kill_at`: with that number of steps in all."""
        torch.manual_seed(3)
        model = self._make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        numbers = list[int]()
        ctx = TrainCtx(
            model=model,
            embedding_optimizer=SGD(lr=0.1),
            dense_optimizer=optimizer,
            embedding_config=EmbeddingConfig(emb_initialization=(-0.1, 0.1)),
            slots=SLOTS,
            mixed_precision=False,
            recovery=Recovery(directory, every_steps=10, state={"scheduler": scheduler}, **settings),
        )
        with ctx:
            for batch in DataLoader(StreamingDataset(loader=self._feed), reproducible=True):
                output, _ = ctx.forward(batch)
                ctx.backward(output.mean())
                scheduler.step()
                numbers.append(int(batch.meta or b""))
                self.between(ctx)
                if ctx.step == kill_at:
                    ctx.wait_for_dump_embedding()
                    raise KilledError
            self.weights = torch.cat([value.detach().flatten() for value in model.parameters()])
            self.rate, self.counters = optimizer.param_groups[0]["lr"], ctx.counters
        return numbers


@pytest.fixture
def script(new_batch: Callable[[int], Any], model: torch.nn.Module) -> Script:
    return Script(new_batch, type(model))


def steps(directory: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in sorted(directory.glob("step-*"))]


def test_a_script_that_is_started_again_trains_the_rest(script: Script, tmp_path: Path) -> None:
    assert script.run(tmp_path / "whole") == list(range(TOTAL))
    weights, rate = script.weights, script.rate

    directory = tmp_path / "killed"
    with pytest.raises(KilledError):
        script.run(directory, kill_at=14)
    assert steps(directory) == [0, 10]
    with pytest.raises(KilledError):
        script.run(directory, kill_at=23)
    assert steps(directory) == [10, 20], "an old one is deleted once a newer one is committed"
    assert script.run(directory) == list(range(20, TOTAL))
    assert torch.equal(script.weights, weights), "equal to the bit, with the scheduler of the script"
    assert script.rate == rate


def test_a_checkpoint_belongs_to_its_step(script: Script, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        script.run(tmp_path, kill_at=14, keep_last=1)
    (step,) = steps(tmp_path)
    manifest, _ = Manifest.read(Location.of(tmp_path / f"step-{step:012d}"))
    assert manifest.step == 10
    assert manifest.trained is not None
    assert [number for number in range(TOTAL) if number in manifest.trained] == list(range(10))


def test_a_periodic_dump_that_fails_is_counted_and_tried_again(script: Script, tmp_path: Path) -> None:
    directory = tmp_path / "recovery"

    def obstruct(ctx: TrainCtx) -> None:
        if ctx.step == 10:  # nothing can be written to it
            directory.rename(tmp_path / "away")
            directory.touch()
        if ctx.step == 11:
            ctx.wait_for_dump_embedding()  # it has failed by then
            directory.unlink()
            (tmp_path / "away").rename(directory)

    script.between = obstruct
    assert script.run(directory) == list(range(TOTAL))
    assert script.counters.dumps_failed == 1
    assert steps(directory) == [0, 20]


def no_position() -> DataPosition:
    raise UnavailableError("rank 1 does not answer")


def test_a_periodic_dump_without_a_position_has_failed(script: Script, tmp_path: Path) -> None:
    def interrupt(ctx: TrainCtx) -> None:
        if ctx.step == 10:  # the periodic dump follows
            ctx._pipeline.position = no_position  # type: ignore[method-assign]
        if ctx.step == 11:
            del ctx._pipeline.position

    script.between = interrupt
    with pytest.raises(KilledError):
        script.run(tmp_path, kill_at=15)
    assert steps(tmp_path) == [0]
    assert script.run(tmp_path) == list(range(TOTAL)), "the model is that of step 0, and so is its data"
    assert script.counters.dumps_failed == 1
    assert steps(tmp_path) == [0, 20]


def test_a_checkpoint_without_a_position_is_not_continued(script: Script, tmp_path: Path) -> None:
    def dump(ctx: TrainCtx) -> None:
        if ctx.step == 7:
            ctx._pipeline.position = no_position  # type: ignore[method-assign]
            ctx.dump_checkpoint(tmp_path, keep_last=2)

    script.between = dump
    with pytest.raises(KilledError):
        script.run(tmp_path, kill_at=8)
    with pytest.raises(FailedPreconditionError, match=r"step-000000000007 does not say .* its 7 steps"):
        script.run(tmp_path)


@pytest.mark.parametrize("resumes", [True, False])
def test_data_that_starts_over_is_warned_of(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture, resumes: bool
) -> None:
    with pytest.raises(KilledError):
        script.run(tmp_path, kill_at=14)
    script.resumes = resumes
    assert "DataCtx.resume()" not in caplog.text, "a new job has nothing to resume"
    assert script.run(tmp_path) == list(range(10 if resumes else 0, TOTAL))
    warnings = [record for record in caplog.records if "DataCtx.resume()" in record.getMessage()]
    assert len(warnings) == (not resumes)
    assert all("continues after step 10" in warning.getMessage() for warning in warnings)


def test_the_first_dump_tells_that_the_directory_cannot_be_written(script: Script, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        script.run(tmp_path / "file" / "recovery")


def test_what_is_no_directory_of_this_job_is_refused(script: Script, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        script.run(tmp_path, kill_at=2)
    with pytest.raises(InvalidArgumentError, match="is a checkpoint itself"):
        script.run(tmp_path / "step-000000000000")
    (tmp_path / "step-000000000000" / "manifest.json").unlink()
    with pytest.raises(NotFoundError, match="latest names step-000000000000"):
        script.run(tmp_path)  # it does not begin anew, which would delete what a person may still need


def test_the_state_of_the_script_is_asked_for(script: Script, tmp_path: Path, model: torch.nn.Module) -> None:
    with pytest.raises(KilledError):
        script.run(tmp_path, kill_at=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx = TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=optimizer,
        slots=SLOTS,
        recovery=Recovery(tmp_path, state={"other": torch.optim.lr_scheduler.StepLR(optimizer, 3)}),
    )
    with pytest.raises(FailedPreconditionError, match="no state of 'other'"), ctx:
        pass


@pytest.mark.parametrize("name", ["every_steps", "keep_last"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        Recovery("anywhere", **{name: 0})
