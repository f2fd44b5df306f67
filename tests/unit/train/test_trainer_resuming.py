"""Trainer: the best model at the end, checkpoints and recovery, samples trained once over resumes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from persia import TrainCtx
from persia.checkpoint.checkpoints import Source
from persia.ctx import Recovery
from persia.errors import FailedPreconditionError
from persia.pipeline.position import DataPosition
from persia.train import Callback, Fit, Trainer
from tests.click_job import SIZE, Clicks, Job, Recorded


def test_a_recovery_must_store_the_trainer(tmp_path: Path) -> None:
    trainer = Trainer(Clicks(), directory=str(tmp_path / "trainer"))
    with pytest.raises(FailedPreconditionError, match=r'pass Recovery\(state=\{"trainer": trainer\}\)'):
        Job().fit(trainer, recovery=Recovery(tmp_path / "recovery"))


def test_a_recovery_resumes_between_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same bits, and the best evaluation so far; `directory` has the best checkpoint alone."""

    def fit(name: str, job: Job, callback: Callback | None = None) -> Fit:
        trainer = Trainer(
            Clicks(),
            Clicks(3, first=100),
            directory=str(tmp_path / name / "trainer"),
            epochs=3,
            evaluate_every=10,
            schedulers=job.schedulers()[:1],
            callbacks=[callback] if callback else [],
            log_every=1,
        )
        recovery = Recovery(tmp_path / name / "recovery", every_steps=4, state={"trainer": trainer})
        return job.fit(trainer, recovery=recovery)

    class Killed(Callback):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            if step == 15:
                raise ZeroDivisionError("killed")

    whole, resumed, finished = Job(), Job(), Job()
    expected = fit("whole", whole)
    with pytest.raises(ZeroDivisionError):
        fit("killed", Job(), Killed())
    assert fit("killed", resumed) == expected
    (step,) = re.findall(r"step (\d+): resumed from", capsys.readouterr().out)
    assert step in ("8", "12")  # the dump of step 12 may have been cancelled when the job was killed
    assert resumed.model.trained == (list(range(12 * SIZE)) * 3)[int(step) * SIZE :]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    assert not (tmp_path / "killed" / "trainer" / "last").exists()
    # A job that has ended repeats the steps since its last periodic checkpoint at most.
    assert fit("killed", finished).best == expected.best
    assert len(finished.model.trained) <= 4 * SIZE


def test_a_checkpoint_between_entering_and_fit_has_what_was_loaded(tmp_path: Path) -> None:
    """A script that calls `fit` late, or a dump by hand, must not cost the best evaluation."""

    def trainer(job: Job) -> Trainer:
        schedulers = job.schedulers()[:1]
        return Trainer(Clicks(), Clicks(3, first=100), evaluate_every=5, patience=9, schedulers=schedulers)

    def recovery(trainer: Trainer) -> Recovery:
        return Recovery(tmp_path, every_steps=8, state={"trainer": trainer})

    whole, idle, resumed = Job(), Job(), Job()
    made = trainer(whole)
    expected = whole.fit(made, recovery=recovery(made))
    made = trainer(idle)
    with idle.ctx(recovery(made)) as ctx:
        loaded = made.state_dict()
        assert (ctx.step, loaded["step"], loaded["best_step"]) == (8, 5, 5)
        ctx.dump_checkpoint(tmp_path, keep_last=2, extra={"trainer": loaded})
    made = trainer(resumed)
    with resumed.ctx(recovery(made)) as ctx:
        assert made.state_dict() == loaded
        assert made.fit(ctx, reproducible=True) == expected
        assert made.state_dict()["step"] == 12


def test_a_removed_best_checkpoint_is_written_again(tmp_path: Path) -> None:
    """The state of a recovery names an evaluation whose model does not exist any more."""

    def fit() -> Fit:
        trainer = Trainer(Clicks(), Clicks(3, first=100), directory=str(tmp_path / "trainer"))
        recovery = Recovery(tmp_path / "recovery", every_steps=4, state={"trainer": trainer})
        return Job().fit(trainer, recovery=recovery)

    expected = fit()
    shutil.rmtree(tmp_path / "trainer" / "best")
    assert fit() == expected
    assert (tmp_path / "trainer" / "best").exists()


def test_a_restarted_job_keeps_a_best_checkpoint_that_is_newer(tmp_path: Path) -> None:
    """The steps up to it are trained once more, here with a worse result."""

    def fit(job: Job, epochs: int, loss: Any = None) -> Fit:
        trainer = Trainer(
            Clicks(),
            Clicks(3, first=100),
            directory=str(tmp_path / "trainer"),
            epochs=epochs,
            patience=1,
            loss=loss,
        )
        # It has the checkpoint of step 0 alone.
        return job.fit(trainer, recovery=Recovery(tmp_path / "recovery", state={"trainer": trainer}))

    def files() -> dict[str, bytes]:
        best = tmp_path / "trainer" / "best"
        return {str(path): path.read_bytes() for path in best.rglob("*") if path.is_file()}

    def worse(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return -torch.nn.functional.binary_cross_entropy_with_logits(output, label[:, 0])

    first = Job()
    expected, written = fit(first, 1), files()
    assert (expected.best_step, expected.best["auc"] > 0.5) == (12, True)
    for epochs in (1, 2):
        again = Job()
        assert fit(again, epochs, worse) == Fit(12 * epochs, 12, expected.best, False)
        assert again.model.trained == list(range(12 * SIZE)) * epochs
        assert files() == written
        for name, value in first.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], value), name


@pytest.mark.parametrize("every_steps", [5, 1000])
def test_a_recovery_refuses_a_job_of_other_data(every_steps: int, tmp_path: Path) -> None:
    """Also if only the best checkpoint is of another job."""

    def fit(trainer: Trainer) -> Fit:
        recovery = Recovery(tmp_path / "recovery", every_steps=every_steps, state={"trainer": trainer})
        return Job().fit(trainer, recovery=recovery)

    directory = str(tmp_path / "trainer")
    fit(Trainer(Clicks(), Clicks(3, first=100), directory=directory))
    with pytest.raises(FailedPreconditionError) as refused:
        fit(Trainer(Clicks(13), Clicks(3, first=100), directory=directory, target=0.1))
    assert "is of 12 batches an epoch, train has 13" in str(refused.value)
    assert f"remove both directories, {tmp_path / 'recovery'} and {directory}" in str(refused.value)
    assert "resume=False" not in str(refused.value)


def test_a_checkpoint_without_a_position_is_passed_over_or_refused(tmp_path: Path) -> None:
    """It is one of a step at which a rank did not answer: it does not say which batches are trained."""
    trainer = Trainer(Clicks(), directory=str(tmp_path), evaluate_every=12)
    Job().fit(trainer)
    with Job().ctx() as ctx:
        ctx.step = 20
        ctx._pipeline.position = lambda: None  # type: ignore[assignment,method-assign,return-value]
        ctx.dump_checkpoint(tmp_path / "best", extra=trainer.state_dict())
    resumed = Job()
    assert resumed.fit(Trainer(Clicks(), directory=str(tmp_path), epochs=2)).step == 24
    assert len(resumed.model.trained) == 12 * SIZE
    shutil.rmtree(tmp_path / "last")
    with pytest.raises(
        FailedPreconditionError,
        match=r"best does not say which batches its 20 steps have trained.*resume=False",
    ):
        Job().fit(Trainer(Clicks(), directory=str(tmp_path)))


def test_the_best_model_is_loaded_where_the_last_one_is_of_the_same_step(tmp_path: Path) -> None:
    """One without a position was passed over, and its steps were trained again with a worse result."""
    trainer, first = Trainer(Clicks(), Clicks(3, first=100), directory=str(tmp_path)), Job()
    expected = first.fit(trainer)
    assert expected.best_step == 12
    again = Job()
    with again.ctx() as ctx:
        ctx.load_checkpoint(str(tmp_path / "best"))
        with torch.no_grad():
            for parameter in again.model.parameters():
                parameter.zero_()
        ctx.dump_checkpoint(tmp_path / "last", extra=trainer.state_dict())
        ctx.load_checkpoint(str(tmp_path / "best"))
        ctx._pipeline.position = lambda: None  # type: ignore[assignment,method-assign,return-value]
        ctx.dump_checkpoint(tmp_path / "best", extra=trainer.state_dict())
    resumed = Job()
    assert resumed.fit(Trainer(Clicks(), Clicks(3, first=100), directory=str(tmp_path))) == expected
    for name, value in first.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_early_stopping_restores_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From step 30 on the loss is turned round, and every evaluation is worse than the one before."""
    valid, steps = Clicks(5, first=100), [0]

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        steps[0] += 1
        right = torch.nn.functional.binary_cross_entropy_with_logits(output, label[:, 0])
        return right if steps[0] <= 30 else -right

    trainer = Trainer(
        Clicks(20),
        valid,
        directory=str(tmp_path),
        epochs=10,
        evaluate_every=10,
        patience=2,
        loss=loss,
        metric="log_loss",
    )
    found: dict[str, Any] = {}
    job = Job()

    def check(ctx: TrainCtx) -> None:
        found.update(step=ctx.step, quality=trainer.evaluate(ctx, valid))

    fit = job.fit(trainer, check)
    assert (fit.step, fit.best_step, fit.stopped_early) == (50, 30, True)
    assert found["step"] == 30
    assert found["quality"].log_loss == fit.best["log_loss"]
    printed = capsys.readouterr().out
    assert "step 30: auc" in printed
    assert "loaded the best checkpoint, of step 30" in printed
    assert "step 50: stopped early, as log_loss was best at step 30 (patience=2)" in printed
    # Once more: it is over, and the best is there again.
    again = Job()
    assert again.fit(trainer, check) == fit
    assert again.model.trained == []
    assert found["quality"].log_loss == fit.best["log_loss"]


def test_a_killed_job_resumes_with_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def trainer(name: str, job: Job, callback: Callback | None = None) -> Trainer:
        return Trainer(
            Clicks(),
            Clicks(3, first=100),
            directory=str(tmp_path / name),
            epochs=3,
            evaluate_every=7,
            # Not of the embeddings: batches in flight may be updated with either rate.
            schedulers=job.schedulers()[:1],
            callbacks=[callback] if callback else [],
        )

    whole = Job()
    fit = whole.fit(trainer("whole", whole))
    every_row = list(range(12 * SIZE)) * 3
    assert whole.model.trained == every_row
    killed = Job()
    recorded = Recorded(fail_at=14)
    with pytest.raises(ZeroDivisionError):
        killed.fit(trainer("killed", killed, recorded))
    assert recorded.calls[-1] == "end"
    resumed = Job()
    assert resumed.fit(trainer("killed", resumed)) == fit
    (step,) = re.findall(r"step (\d+): resumed from", capsys.readouterr().out)
    assert step in ("7", "14")  # the dump of step 14 may have been cancelled when the job was killed
    assert resumed.model.trained == every_row[int(step) * SIZE :]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_batches_trained_out_of_order_are_not_trained_again(tmp_path: Path) -> None:
    """As two loaders of unequal speed leave them: batches 0, 1, 2 and 4 are trained, 3 is not."""
    trainer = Trainer(Clicks(), directory=str(tmp_path))
    with Job().ctx() as ctx:
        ctx.step = 4
        ctx._pipeline.start_after(DataPosition(((6, 2),)))
        ctx.dump_checkpoint(tmp_path / "last", extra=trainer.state_dict())
    resumed = Job()
    fit = resumed.fit(trainer)
    assert [row // SIZE for row in resumed.model.trained[::SIZE]] == [3, *range(5, 12)]
    assert (fit.step, fit.best_step) == (12, None)


def test_batches_of_a_checkpoint_of_other_data_are_not_left_out(tmp_path: Path) -> None:
    """A script may call `load_checkpoint`, to train on with new data."""
    Job().fit(Trainer(Clicks(), directory=str(tmp_path)))
    job = Job()
    with job.ctx() as ctx:
        ctx.load_checkpoint(tmp_path / "last")
        fit = Trainer(Clicks(), Clicks(2, first=100)).fit(ctx, reproducible=True)
    assert job.model.trained == list(range(12 * SIZE))
    assert (fit.step, fit.best_step) == (24, 24)


def test_other_data_and_other_checkpoints_are_refused(tmp_path: Path) -> None:
    Job().fit(Trainer(Clicks(), directory=str(tmp_path)))
    with pytest.raises(
        FailedPreconditionError, match=r"is of 12 batches an epoch, train has 13 .*resume=False"
    ):
        Job().fit(Trainer(Clicks(13), directory=str(tmp_path)))
    job = Job()
    with pytest.raises(FailedPreconditionError, match="states of 0 schedulers, schedulers= has 2"):
        job.fit(Trainer(Clicks(), directory=str(tmp_path), schedulers=job.schedulers()))
    fresh = Job()
    fresh.fit(Trainer(Clicks(13), directory=str(tmp_path), resume=False))
    assert len(fresh.model.trained) == 13 * SIZE
    with Job().ctx() as ctx:
        ctx.step = 20
        ctx.dump_checkpoint(tmp_path / "last")
    untouched = Job()
    with pytest.raises(FailedPreconditionError, match=r"step 20 that no Trainer of this version wrote"):
        untouched.fit(Trainer(Clicks(13), directory=str(tmp_path)))


def test_more_epochs_continue_where_the_job_ended(tmp_path: Path) -> None:
    first, resumed = Job(), Job()
    first.fit(Trainer(Clicks(), directory=str(tmp_path), schedulers=first.schedulers()))
    trainer = Trainer(Clicks(), directory=str(tmp_path), epochs=2, schedulers=resumed.schedulers())
    assert resumed.fit(trainer).step == 24
    assert resumed.model.trained == list(range(12 * SIZE))
    # Warm-up is over after 30 steps.
    assert resumed.embedding_optimizer.lr == pytest.approx(0.1 * (0.1 + 0.9 * 24 / 30))
    assert resumed.dense_optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (0.1 + 0.9 * 24 / 30))


def test_schedulers_with_numbers_as_keys_are_resumed(tmp_path: Path) -> None:
    def scheduler(job: Job) -> Any:
        lr = torch.optim.lr_scheduler
        parts = [lr.ConstantLR(job.dense_optimizer, 0.5), lr.MultiStepLR(job.dense_optimizer, [10, 16], 0.1)]
        return lr.SequentialLR(job.dense_optimizer, parts, [4])

    for epochs in (1, 2):  # milestones are at steps 14 and 20
        job = Job()
        job.fit(Trainer(Clicks(), directory=str(tmp_path), epochs=epochs, schedulers=[scheduler(job)]))
    assert len(job.model.trained) == 12 * SIZE
    assert job.dense_optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**2)


def test_a_new_job_in_a_used_directory_removes_the_old_checkpoints(tmp_path: Path) -> None:
    valid = Clicks(2, first=100)
    Job().fit(Trainer(Clicks(), valid, directory=str(tmp_path), epochs=2))
    assert (tmp_path / "best").exists()
    Job().fit(Trainer(Clicks(5), directory=str(tmp_path), resume=False, evaluate_every=2))
    assert not (tmp_path / "best").exists()
    assert Job().fit(Trainer(Clicks(5), directory=str(tmp_path), epochs=2)).step == 10


def test_each_new_job_of_a_trainer_removes_the_old_checkpoints(tmp_path: Path) -> None:
    """The first job's `best` would be loaded at the end of a job that resumes the second one."""
    held_out = Clicks(4, first=50)
    trainer = Trainer(Clicks(), held_out, directory=str(tmp_path), evaluate_every=6, resume=False)
    trainer.epochs = 3
    assert Job().fit(trainer).step == 36
    trainer.epochs, trainer.valid = 1, None
    assert Job().fit(trainer).step == 12
    assert not (tmp_path / "best").exists()
    assert Source(tmp_path / "last").manifest.step == 12
