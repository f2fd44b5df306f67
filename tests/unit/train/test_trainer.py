"""Trainer: its metrics against scikit-learn, the best model at the end, samples trained once over resumes."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

from persia import DataCtx, IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch, TrainCtx
from persia.ctx import Recovery
from persia.data import FeatureSpec, SplitBinaryBatches, SplitBinaryWriter
from persia.embedding.lr_schedule import LRSchedule
from persia.embedding.optim import Adagrad
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError, PersiaError
from persia.pipeline.position import DataPosition
from persia.storage.location import Location
from persia.train import Callback, Fit, MLflow, TensorBoard, Trainer, WandB
from persia.train.state import JobState
from persia.train.trainer import _end_together, _share_buffers
from persia.utils import setup_seed

SLOTS = {"slots_config": {"C{1..2}": {"dim": 4}}}
SIZE = 32


class Clicks:
    """Made-up batches, in which one ID decides, with noise. The dense feature is the number of the row."""

    def __init__(self, num_batches: int = 12, first: int = 0) -> None:
        self._num_batches, self._first = num_batches, first

    def __len__(self) -> int:
        return self._num_batches

    def read(self, first: int = 0) -> Iterator[int]:
        yield from range(self._first + first, self._first + self._num_batches)

    def make(self, rows: int, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
        random = np.random.default_rng(rows)
        ids = random.integers(20, size=(2, SIZE)).astype(np.uint64)
        clicked = (ids[0] < 10) ^ (random.random(SIZE) < 0.1)
        return PersiaBatch(
            [IDTypeFeature(f"C{i + 1}", list(ids[i].reshape(-1, 1))) for i in range(2)],
            [NonIDTypeFeature(np.arange(rows * SIZE, (rows + 1) * SIZE, dtype=np.float32).reshape(-1, 1))],
            [Label(clicked.astype(np.float32).reshape(-1, 1))],
            requires_grad=requires_grad,
            meta=meta,
        )


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.trained: list[int] = []  # rows

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        if self.training:
            self.trained += dense[0][:, 0].int().tolist()
        logits: torch.Tensor = self.tower(torch.cat(embeddings, dim=1)).squeeze(1)
        return logits


class Recorded(Callback):
    """What a callback was told; fails at the evaluation after step `fail_at`, as a job that is killed."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.calls: list[Any] = []

    def start(self) -> None:
        self.calls.append("start")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((step, dict(values)))
        if "auc" in values and self.fail_at is not None and step > self.fail_at:
            raise ZeroDivisionError("killed")

    def end(self) -> None:
        self.calls.append("end")


class Job:
    """A model and its context, which a test trains."""

    slots: Any = SLOTS

    def __init__(self) -> None:
        setup_seed(7)
        self.model = Model()
        self.embedding_optimizer = Adagrad(lr=0.1)
        self.dense_optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def ctx(self, recovery: Recovery | None = None) -> TrainCtx:
        return TrainCtx(
            self.embedding_optimizer,
            self.dense_optimizer,
            model=self.model,
            slots=self.slots,
            recovery=recovery,
        )

    def fit(
        self,
        trainer: Trainer,
        then: Callable[[TrainCtx], None] = lambda ctx: None,
        recovery: Recovery | None = None,
    ) -> Fit:
        with self.ctx(recovery) as ctx:
            fit = trainer.fit(ctx, reproducible=True)
            then(ctx)
        return fit

    def schedulers(self) -> list[Any]:
        def make(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=30)

        return [make(self.dense_optimizer), LRSchedule(self.embedding_optimizer, make)]


@pytest.mark.parametrize(("metric", "reach"), [("auc", 0.6), ("log_loss", 0.68)])
def test_stops_at_a_target(
    metric: str, reach: float, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def trainer(target: float | None) -> Trainer:
        return Trainer(
            Clicks(),
            Clicks(4, first=50),
            directory=str(tmp_path),
            epochs=3,
            evaluate_every=6,
            metric=metric,
            target=target,
        )

    fit = Job().fit(trainer(reach))
    assert fit.stopped_early
    assert 6 <= fit.step < 36
    assert (fit.best[metric] >= reach) if metric == "auc" else (fit.best[metric] <= reach)
    assert f"stopped early, as {metric} is that of target={reach} or better" in capsys.readouterr().out
    # A job that has it trains no more when it resumes; without the target it goes to the end.
    assert Job().fit(trainer(reach)).step == fit.step
    fit = Job().fit(trainer(None))
    assert (fit.step, fit.stopped_early) == (36, False)


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


def test_the_best_evaluation_is_that_of_the_best_checkpoint(tmp_path: Path) -> None:
    """It may be newer than the checkpoint that a recovery returned to, or removed."""
    trainer = Trainer(Clicks(), Clicks(3, first=100), directory=str(tmp_path), evaluate_every=4)
    best = Job().fit(trainer)
    state = JobState(step=2, best_step=2, best={"auc": 0.1}, since_best=3)
    job = (12, 0, "pass resume=False")
    state.take_best(Location.of(tmp_path), *job)
    assert (state.best_step, state.best, state.since_best) == (best.best_step, best.best, 0)
    state.take_best(Location.of(tmp_path / "nothing"), *job)
    assert (state.best_step, state.best) == (None, {})


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


def test_a_target_needs_held_out_batches() -> None:
    with pytest.raises(InvalidArgumentError, match="target=0.8 needs valid="):
        Trainer(Clicks(), target=0.8)


def test_batches_may_have_another_order_in_each_epoch() -> None:
    class Reordered(Clicks):
        order = (0, 1, 2)

        def read(self, first: int = 0) -> Iterator[int]:
            yield from self.order[first:]

        def of_epoch(self, epoch: int) -> Reordered:
            made = Reordered(3)
            made.order = ((0, 1, 2), (2, 0, 1))[epoch]
            return made

    job = Job()
    job.fit(Trainer(Reordered(3), epochs=2))
    assert job.model.trained == [
        row for batch in (0, 1, 2, 2, 0, 1) for row in range(batch * SIZE, (batch + 1) * SIZE)
    ]


def test_shuffled_files_have_another_order_in_each_epoch(tmp_path: Path) -> None:
    """`SplitBinaryBatches.read` yields positions, so that only `make` applies the order of the epoch."""
    num_rows = 16 * SIZE
    spec = FeatureSpec.make(tmp_path, [None, None], num_numerical=1, mappings=["train"])
    with SplitBinaryWriter(spec, "train") as writer:
        rows = np.arange(num_rows)
        writer.write(rows.reshape(-1, 1), [rows % 20, rows % 7], rows % 2)

    class JobOfFiles(Job):
        slots = spec.slots(4)

    batches = SplitBinaryBatches(spec, batch_size=SIZE, shuffle_seed=3)
    job = JobOfFiles()
    job.fit(Trainer(batches, epochs=2))
    first, second = job.model.trained[:num_rows], job.model.trained[num_rows:]
    assert sorted(first) == sorted(second) == list(range(num_rows))
    assert first != second
    assert second == [
        int(row)
        for number in range(len(batches))
        for row in batches.of_epoch(1).make(number, requires_grad=False).non_id_type_features[0].data[:, 0]
    ]


def predictions(ctx: TrainCtx, batches: Clicks) -> tuple[Any, Any]:
    """Probabilities and labels, by another way than the trainer's."""
    logits, labels = [], []
    ctx.model.eval()  # type: ignore[union-attr]
    for rows in batches.read():
        batch = ctx.get_embedding_from_data(batches.make(rows, requires_grad=False))
        output, (label,) = ctx.forward(batch)  # type: ignore[misc]
        logits.append(output.detach())
        labels.append(label[:, 0])
    return torch.cat(logits).double().sigmoid().numpy(), torch.cat(labels).numpy()


def test_metrics_are_those_of_scikit_learn(tmp_path: Path) -> None:
    valid, recorded = Clicks(5, first=100), Recorded()
    trainer = Trainer(
        Clicks(),
        valid,
        directory=str(tmp_path),
        epochs=3,
        evaluate_every=16,
        callbacks=[recorded],
        log_every=10,
    )
    found: dict[str, Any] = {}

    def check(ctx: TrainCtx) -> None:
        found["quality"] = trainer.evaluate(ctx, valid)
        assert ctx.model is not None
        assert ctx.model.training  # as before the evaluation
        found["predictions"] = predictions(ctx, valid)

    fit = Job().fit(trainer, check)
    chances, labels = found["predictions"]
    assert found["quality"].num_samples == 5 * SIZE
    assert found["quality"].auc == pytest.approx(roc_auc_score(labels, chances), abs=1e-12)
    assert found["quality"].log_loss == pytest.approx(log_loss(labels, chances), rel=1e-6)
    assert fit.best["auc"] == found["quality"].auc > 0.6
    assert (fit.step, fit.stopped_early) == (36, False)
    assert recorded.calls[0] == "start"
    assert recorded.calls[-1] == "end"
    evaluated = {step: values for step, values in recorded.calls[1:-1] if "auc" in values}
    assert list(evaluated) == [16, 32, 36]  # the last one before the callback's end
    assert evaluated[fit.best_step] == fit.best
    assert [step for step, values in recorded.calls[1:-1] if list(values) == ["loss"]] == [10, 20, 30]


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


def test_batches_of_another_loader_are_refused() -> None:
    class Other(Trainer):
        def load(self) -> None:
            with DataCtx() as data:
                data.send_data(Clicks().make(0, requires_grad=True))

    with pytest.raises(FailedPreconditionError, match=r"let its script call load\(\)"):
        Job().fit(Other(Clicks()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "accuracy"}, "metric='accuracy' must be one of auc, log_loss"),
        ({"patience": 2}, "patience=2 needs valid="),
        ({"evaluate_every": 0}, "evaluate_every"),
        ({"epochs": 0}, "epochs"),
        ({"valid": Clicks(0)}, "valid has no batches"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Trainer(Clicks(), **changes)


def test_no_batches_to_train_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="train has no batches"):
        Trainer(Clicks(0))


def test_a_schedule_that_needs_a_metric_is_refused() -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    job = Job()
    for scheduler in (make(job.dense_optimizer), LRSchedule(job.embedding_optimizer, make)):
        with pytest.raises(InvalidTypeError, match="ReduceLROnPlateau"):
            Trainer(Clicks(), schedulers=[scheduler])


def test_a_metric_that_is_no_number_is_never_the_best(caplog: pytest.LogCaptureFixture) -> None:
    class OneClass(Clicks):
        def make(self, rows: int, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
            batch = super().make(rows, requires_grad=requires_grad, meta=meta)
            batch.labels[0].data[:] = 1
            return batch

    fit = Job().fit(Trainer(Clicks(), OneClass(2), evaluate_every=3, patience=2))
    assert (fit.step, fit.best_step, fit.stopped_early) == (12, None, False)
    assert "step 3: auc is NaN: valid needs samples of both labels" in caplog.text


def test_predictions_that_are_not_finite_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Model):
        def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            logits = super().forward(dense, embeddings)
            return logits if self.training else logits.index_fill(0, torch.tensor([0]), torch.nan)

    job = Job()
    job.model = Broken()
    job.dense_optimizer = torch.optim.Adam(job.model.parameters())
    job.fit(Trainer(Clicks(), Clicks(2, first=100)))
    assert "num_nonfinite 2" in capsys.readouterr().out


def test_one_loss_that_is_no_number_is_left_out_of_the_mean() -> None:
    steps, recorded = [0], Recorded()

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        steps[0] += 1
        return output.sum().reshape(1) * 0 + (torch.nan if steps[0] == 2 else float(steps[0]))

    with contextlib.suppress(PersiaError):  # what the gradients of a NaN do is another matter
        Job().fit(Trainer(Clicks(4), loss=loss, callbacks=[recorded], log_every=4))
    assert dict(recorded.calls[1:-1])[4] == {"loss": pytest.approx((1 + 3 + 4) / 3)}


def test_an_evaluation_keeps_frozen_modules_frozen() -> None:
    job = Job()
    job.model.tower[1].eval()
    job.fit(Trainer(Clicks(), Clicks(2, first=100)))
    assert [module.training for module in job.model.tower] == [True, False, True]
    assert job.model.training


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


def _on_a_rank(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = torch.nn.BatchNorm1d(3)
    model.running_mean.fill_(rank + 1)  # type: ignore[union-attr]
    steps: list[int] = []
    scheduler = SimpleNamespace(step=lambda: steps.append(1))
    ctx: Any = SimpleNamespace(world_size=2, step=3 + 2 * rank, device=None)
    _share_buffers(model)
    assert model.running_mean.tolist() == [1, 1, 1]  # type: ignore[union-attr]
    _end_together(ctx, [scheduler])
    assert (ctx.step, len(steps)) == (5, 2 if rank == 0 else 0)
    dist.destroy_process_group()


def test_ranks_share_buffers_and_the_last_step(tmp_path: Path) -> None:
    spawn(_on_a_rank, (str(tmp_path / "group"),), nprocs=2)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("callback", "package"), [(TensorBoard(), "tensorboard"), (WandB(), "wandb"), (MLflow(), "mlflow")]
)
def test_a_missing_logger_is_an_error_with_the_pip_line(
    callback: Callback, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(FailedPreconditionError, match=f"pip install {package}"):
        callback.start()


def test_loggers_get_steps_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against stand-ins with the signatures of the three libraries."""
    calls: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            calls.append(("tensorboard", folder))

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            calls.append((tag, scalar_value, global_step))

        def close(self) -> None:
            calls.append("closed")

    class Run:
        def log(self, data: dict[str, float], step: int | None = None) -> None:
            calls.append((data, step))

        def finish(self) -> None:
            calls.append("finished")

    def init(project: str) -> Run:
        calls.append(project)
        return Run()

    stand_ins = {
        "tensorboard": SimpleNamespace(),
        "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=Writer),
        "wandb": SimpleNamespace(init=init),
        "mlflow": SimpleNamespace(
            set_experiment=calls.append,
            start_run=lambda run_name: calls.append(run_name),
            log_metrics=lambda metrics, step: calls.append((metrics, step)),
            end_run=lambda: calls.append("ended"),
        ),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    for callback in (TensorBoard("logs"), WandB(project="ads"), MLflow("ads", run_name="first")):
        callback.start()
        callback.log(3, {"auc": 0.7})
        callback.end()
    assert calls == [
        ("tensorboard", "logs"),
        ("auc", 0.7, 3),
        "closed",
        *("ads", ({"auc": 0.7}, 3), "finished"),
        *("ads", "first", ({"auc": 0.7}, 3), "ended"),
    ]
