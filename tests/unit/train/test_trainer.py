"""Trainer: how it trains, its metrics against scikit-learn, its settings, and what loggers get."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.metrics import log_loss, roc_auc_score
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

from persia import DataCtx, PersiaBatch, TrainCtx
from persia.ctx import evaluate, evaluation
from persia.ctx.evaluation import share_buffers
from persia.ctx.ranks import meet as meet_ranks
from persia.data import FeatureSpec, SplitBinaryBatches, SplitBinaryWriter
from persia.embedding.lr_schedule import LRSchedule
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError, PersiaError
from persia.observability.phases import WAIT_FOR_BATCH
from persia.train import Callback, MLflow, TensorBoard, Trainer, WandB
from persia.waiting import Attempts
from tests.click_job import SIZE, Clicks, Job, Model, Recorded


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


def test_what_training_waits_for_batches_is_measured() -> None:
    before = WAIT_FOR_BATCH.stats.snapshot()[1]
    fit = Job().fit(Trainer(Clicks(8), Clicks(2, first=50)))
    # Training waits for its first batch at least; the evaluations have waited, too.
    # Both clocks run for the same waits, and the outer one for the calls around them.
    assert 0 < fit.waited_s < WAIT_FOR_BATCH.stats.snapshot()[1] - before + 0.1


@pytest.mark.parametrize("wrong", ["train", "valid"])
def test_batches_that_end_before_their_length_end_the_job(wrong: str) -> None:
    class Short(Clicks):
        def read(self, first: int = 0) -> Iterator[int]:
            yield from list(super().read())[first:3]

    batches = {"train": Clicks(), "valid": Clicks(4, first=50)} | {wrong: Short(4, first=50)}
    with pytest.raises(
        PersiaError, match=r"Short has 4 batches by its len\(\), but its read\(\) ends before batch 3"
    ):
        Job().fit(Trainer(**batches))


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


def test_what_a_script_prints_on_another_rank_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The trainer itself is silent there, also on a terminal."""

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        print("a line of the script")
        print("a warning of the script", file=sys.stderr)
        return output.sum()

    trainer = Trainer(Clicks(3), loss=loss)
    trainer._console = Console(force_terminal=True)
    with Job().ctx() as ctx:
        ctx.rank = 1
        trainer.fit(ctx)
    printed = capsys.readouterr()
    assert printed.out == 3 * "a line of the script\n"
    assert printed.err.count("a warning of the script\n") == 3


def _on_a_rank(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = torch.nn.BatchNorm1d(3)
    model.running_mean.fill_(rank + 1)  # type: ignore[union-attr]
    steps: list[int] = []
    scheduler = SimpleNamespace(step=lambda: steps.append(1))
    ctx: Any = SimpleNamespace(world_size=2, step=3 + 2 * rank, device=None)
    share_buffers(model)
    assert model.running_mean.tolist() == [1, 1, 1]  # type: ignore[union-attr]
    Trainer(Clicks(), schedulers=[scheduler])._end_together(ctx)
    assert (ctx.step, len(steps)) == (5, 2 if rank == 0 else 0)
    dist.destroy_process_group()


def test_ranks_share_buffers_and_the_last_step(tmp_path: Path) -> None:
    spawn(_on_a_rank, (str(tmp_path / "group"),), nprocs=2)  # type: ignore[no-untyped-call]


def _evaluate_on_a_rank(rank: int, folder: str) -> None:
    """Rank 1 hands its updates in only when rank 0 has its own, and waits for those of all ranks."""
    place = Path(folder)  # of what is evaluated now
    num_waits = 0

    def check_applied(*_dump: object, **_options: object) -> None:
        assert (place / "applied").exists(), "evaluated or dumped before the updates of rank 1"

    class Checked(Model):
        def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            check_applied()
            return super().forward(dense, embeddings)

    def wait_for_gradients() -> None:
        nonlocal num_waits
        num_waits += 1
        if rank == 0:
            (place / "waited").touch()
            return
        for _ in Attempts(60.0, pause_s=0.01):
            if (place / "meets").exists():
                break
        assert (place / "meets").exists(), "rank 0 does not wait"
        (place / "applied").touch()

    def meet(world_size: int) -> None:
        if rank == 0 and (place / "waited").exists():
            (place / "meets").touch()
        meet_ranks(world_size)

    job = Job()
    job.model = Checked()
    evaluation.meet = meet
    with job.ctx() as ctx:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
        ctx.rank, ctx.world_size = rank, 2
        ctx.wait_for_gradients = wait_for_gradients  # type: ignore[method-assign]
        ctx.dump_checkpoint = check_applied  # type: ignore[method-assign]
        trainers = [Trainer(Clicks(), valid, directory=folder) for valid in (Clicks(4), None)]
        for number, trainer in enumerate([None, *trainers]):
            place = Path(folder) / str(number)
            place.mkdir(exist_ok=True)
            if trainer is None:
                assert evaluate(ctx, Clicks(4)).num_samples == 4 * SIZE
            else:
                trainer._clears = False
                trainer._evaluate(ctx, 1)
            assert num_waits == number + 1
        dist.destroy_process_group()


def test_an_evaluation_waits_for_the_updates_of_all_ranks_once(tmp_path: Path) -> None:
    spawn(_evaluate_on_a_rank, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]


def test_what_decides_on_the_best_is_shown_and_fixed() -> None:
    trainer = Trainer(Clicks(), Clicks(2), metric="log_loss", target=0.5, patience=3)
    assert (trainer.metric, trainer.target, trainer.patience) == ("log_loss", 0.5, 3)
    with pytest.raises(AttributeError):
        trainer.patience = 4  # type: ignore[misc]


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
