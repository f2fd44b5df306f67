"""The training loop: trains, evaluates, keeps the best checkpoint, stops early, and resumes where it was.

Its checkpoints are those of the context, with the position of the data. Its own state is their `extra`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from persia.ctx import DataCtx, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.data.striped import Batches, StripedBatches
from persia.embedding.checks import at_least, checked_number
from persia.embedding.data import PersiaBatch
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from persia.logger import get_default_logger
from persia.nn import ClickMetrics, ClickQuality
from persia.observability import report
from persia.pipeline.batch import PersiaTrainingBatch
from persia.pipeline.position import DataPosition
from persia.storage.location import Location
from persia.train.callbacks import Callback
from persia.train.state import NAMES, JobState, check_position, newest, read_state

_HIGHER_IS_BETTER = {"auc": True, "log_loss": False, "normalized_entropy": False}


@dataclass(frozen=True)
class Fit:
    """What `Trainer.fit` has done."""

    step: int  # batches that this rank had trained at the end, those before a resume included
    best_step: int | None  # of the best evaluation, whose model and rows the context has; None: no evaluation
    best: dict[str, float]  # metrics of that evaluation
    stopped_early: bool


class Trainer:
    """Trains a model of clicks: its output is a logit for each sample, its first label column is 0 or 1.

    The same script runs in one process and as the ranks of a cluster, whose data loaders call `load`. All
    ranks evaluate, each its share of `valid`. Rank 0 prints, and calls the callbacks.

    Args:
        train: the batches of one epoch.
        valid: held-out batches for the evaluations; None: there are none, only checkpoints.
        directory: path or URL of the checkpoints, visible to ranks and servers. `best` in it has the best
            metric, `last` the newest if that is another one. None: no checkpoints. In a context with a
            `recovery`, which takes checkpoints between evaluations as well, there is only `best`.
        epochs: passes over `train`.
        evaluate_every: steps between two evaluations, each with a checkpoint; None: an epoch. There is always
            one at the end.
        metric: "auc", "log_loss" or "normalized_entropy": decides which evaluation is the best.
        target: value of `metric` at which training stops, such as an AUC of 0.8025; None: it does not.
        patience: evaluations without a new best after which training stops; None: it does not.
        loss: called with the output and the first label of the batch, float32 [batch, columns]; returns a
            scalar. None: binary cross-entropy with logits.
        schedulers: of `torch.optim.lr_scheduler`, or `LRSchedule`s: stepped after each step on every rank,
            and stored with checkpoints. Not `ReduceLROnPlateau`, which needs a metric.
        callbacks: see `Callback`.
        log_every: steps between two logs of the mean training loss.
        resume: continues from the newest checkpoint of `directory`, if there is one. False: the first
            checkpoint of the new job replaces those of the old one. A context with a `recovery` continues
            from its newest checkpoint instead: name the trainer in `Recovery(state={"trainer": trainer})`.

    Raises:
        InvalidArgumentError: a number below 1, an unknown metric, no batches; `patience` or `target` without
            `valid`.
        InvalidTypeError: a `ReduceLROnPlateau`.
    """

    def __init__(
        self,
        train: Batches,
        valid: Batches | None = None,
        *,
        directory: str | None = None,
        epochs: int = 1,
        evaluate_every: int | None = None,
        metric: str = "auc",
        target: float | None = None,
        patience: int | None = None,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        schedulers: Sequence[Any] = (),
        callbacks: Sequence[Callback] = (),
        log_every: int = 100,
        resume: bool = True,
    ) -> None:
        for name, value in (("evaluate_every", evaluate_every), ("patience", patience)):
            if value is not None:
                at_least(1, name, value)
        if metric not in _HIGHER_IS_BETTER:
            raise InvalidArgumentError(f"metric={metric!r} must be one of {', '.join(_HIGHER_IS_BETTER)}")
        for name, limit in (("patience", patience), ("target", target)):
            if limit is not None and valid is None:
                raise InvalidArgumentError(f"{name}={limit} needs valid=, the batches to evaluate on")
        for name, batches in (("train", train), ("valid", valid)):
            if batches is not None and not len(batches):
                raise InvalidArgumentError(f"{name} has no batches: pass at least one")
        for scheduler in schedulers:
            if isinstance(getattr(scheduler, "scheduler", scheduler), ReduceLROnPlateau):
                raise InvalidTypeError(
                    "schedulers has a ReduceLROnPlateau, which needs a metric: use a schedule of the step"
                )
        self.train, self.valid, self.metric, self.patience = train, valid, metric, patience
        self.directory = None if directory is None else Location.of(directory)
        self.target = None if target is None else checked_number("target", target)
        self.epochs, self.log_every = at_least(1, "epochs", epochs), at_least(1, "log_every", log_every)
        self.evaluate_every, self.loss, self.resume = evaluate_every, loss or _cross_entropy, resume
        self.schedulers, self.callbacks = list(schedulers), list(callbacks)
        self._console = Console(soft_wrap=True, highlight=False)
        self._state = JobState()
        self._clears = False  # the next checkpoint replaces those of another job
        self._has_best = False  # the context has the model of the best evaluation

    def load(self, data: DataCtx | None = None) -> None:
        """Sends the batches that are still to train: the whole of a data loader script.

        In one process `fit` calls it. In a cluster each data loader sends its share of the batches that ranks
        do not have, by `DataCtx.resume`.

        Args:
            data: the context of a script that needs its `world_size` to make `train`; None: a new one.
        """
        with DataCtx() if data is None else nullcontext(data) as data:
            share, first = (data.replica_index, data.replica_size), data.resume()
            for batch in StripedBatches(self.train, *share, epochs=self.epochs, first=first):
                data.send_data(batch)

    def fit(self, ctx: TrainCtx, **loader_options: Any) -> Fit:
        """Trains until the data ends or the metric stops improving; then loads the best checkpoint.

        All ranks call it once inside their context. `loader_options` are those of `DataLoader`, such as
        `embedding_staleness=16`. Without `directory` the model stays as it is after the last step.

        Raises FailedPreconditionError for batches that `load` did not send, for checkpoints of other data or
        that no Trainer wrote, and for a `recovery` whose `state` does not name this trainer.
        """
        self._resume(ctx)
        state, self._clears = self._state, not self.resume
        left = self._left(ctx)
        end, all_train_until = ctx.step + max(left), ctx.step + min(left)
        every = self.evaluate_every or -(-len(self.train) // ctx.world_size)
        sums = torch.zeros(2, device=ctx.device)  # of finite losses, and their number
        with ExitStack() as resources:
            for callback in self.callbacks if ctx.rank == 0 else ():
                callback.start()
                resources.callback(callback.end)
            is_hidden = ctx.rank > 0 or not self._console.is_terminal
            bar = resources.enter_context(Progress(console=self._console, disable=is_hidden))
            task = bar.add_task("training", total=end, completed=ctx.step)
            for batch in DataLoader(StreamingDataset(loader=self.load), **loader_options):
                self._train(ctx, batch, sums)
                bar.update(task, completed=ctx.step)
                if ctx.step % self.log_every == 0:
                    mean = (sums[0] / sums[1]).item()
                    self._log(ctx, {"loss": mean})
                    bar.update(task, description=f"loss {mean:.4f}")
                    sums.zero_()
                # A rank that has no more batches takes part in no evaluation until all have ended.
                if ctx.step % every == 0 and ctx.step <= all_train_until:
                    self._evaluate(ctx, end)
                    if self._is_over(state):
                        break
            _end_together(ctx, self.schedulers)
            if state.step != ctx.step:
                self._evaluate(ctx, end)
        return self._finish(ctx, stopped_early=self._is_over(state) and state.step < end)

    def state_dict(self) -> dict[str, Any]:
        """What has been evaluated, and the states of the schedulers: for `Recovery(state=...)`."""
        self._state.batches = len(self.train)
        self._state.schedulers = [scheduler.state_dict() for scheduler in self.schedulers]
        return dict(vars(self._state))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Called by a context with a `recovery`. `fit` checks and uses what it has."""
        self._state = JobState(**state_dict)

    def evaluate(self, ctx: TrainCtx, batches: Batches) -> ClickQuality:
        """The quality of the context's model over `batches`, equal on all ranks. All ranks call it.

        Raises InvalidArgumentError for a label other than 0 and 1 in the first column.
        """
        model, outputs, targets = ctx.model, [], []
        assert model is not None, "a TrainCtx has one"
        modes = {module: module.training for module in model.modules()}
        model.eval()
        if ctx.world_size > 1:
            _share_buffers(model)
        if isinstance(model, DistributedDataParallel):  # it may call collectives, and shares are uneven
            model = model.module
        try:
            with eval_ctx(model=model) as evaluation, torch.no_grad():
                for batch in DataLoader(_Share(batches, ctx.rank, ctx.world_size)):
                    output, labels = evaluation.forward(batch)
                    assert labels is not None, "only inference has none"
                    outputs.append(output.reshape(len(labels[0]), -1)[:, 0].float())
                    targets.append(labels[0].reshape(len(labels[0]), -1)[:, 0])
        finally:
            for module, was_training in modes.items():  # the script may have frozen some
                module.training = was_training
        metrics = ClickMetrics(max(1, sum(map(len, outputs))), from_logits=True)
        if outputs:
            metrics.update(torch.cat(outputs), torch.cat(targets))
        return metrics.compute(dist.group.WORLD if ctx.world_size > 1 else None)

    def _train(self, ctx: TrainCtx, batch: PersiaTrainingBatch, sums: torch.Tensor) -> None:
        """One step; adds its loss to `sums`."""
        if not ctx._pipeline.data_resumes:
            raise FailedPreconditionError(
                "the data loader did not ask which batches are trained: let its script call load() of the "
                "same Trainer"
            )
        output, labels = ctx.forward(batch)
        assert labels is not None, "only inference has none"
        loss = self.loss(output, labels[0])
        ctx.backward(loss)
        for scheduler in self.schedulers:
            scheduler.step()
        loss = loss.detach().float().reshape(())
        sums += torch.stack([loss.nan_to_num(0.0, 0.0, 0.0), loss.isfinite()])

    def _evaluate(self, ctx: TrainCtx, end: int) -> None:
        """Evaluates and writes a checkpoint. All ranks call it, at the same step; the last step is `end`."""
        state = self._state
        ctx.wait_for_gradients()
        _meet(ctx)  # no row changes until all train again
        state.step = ctx.step
        is_best = False
        if self.valid is not None:
            quality = asdict(self.evaluate(ctx, self.valid)).items()
            values = {name: float(value) for name, value in quality if value is not None}
            self._log(ctx, values)
            sign = 1 if _HIGHER_IS_BETTER[self.metric] else -1
            best, value = sign * state.best.get(self.metric, -sign * math.inf), sign * values[self.metric]
            is_best = value > best
            if is_best:
                state.best_step, state.best, state.since_best = ctx.step, values, 0
            # After a restart, steps up to the best one may be trained once more: patience counts later ones.
            elif not math.isnan(value) and ctx.step > (state.best_step or 0):
                state.since_best += 1
            if ctx.rank == 0:
                if math.isnan(value):
                    get_default_logger().warning(
                        f"step {ctx.step}: {self.metric} is NaN: valid needs samples of both labels, and the "
                        "model finite outputs; patience does not count this evaluation"
                    )
                names = ["auc", "log_loss", "normalized_entropy", "calibration"]
                names += ["num_nonfinite"] if values["num_nonfinite"] else []
                shown = ", ".join(f"{name} {values[name]:.5g}" for name in names)
                self._console.print(f"step {ctx.step}: {shown}{' (best)' if is_best else ''}")
                if self._is_over(state) and ctx.step < end:
                    why = f"{self.metric} was best at step {state.best_step} (patience={self.patience})"
                    if self._has_target(state):
                        why = f"{self.metric} is that of target={self.target} or better"
                    self._console.print(f"step {ctx.step}: stopped early, as {why}")
        self._has_best = is_best
        if self.directory is not None and ctx.rank == 0 and (is_best or ctx.recovery is None):
            if self._clears:
                for name in NAMES:
                    (self.directory / name).remove()
                self._clears = False
            place = self.directory / ("best" if is_best else "last")
            # It has its snapshot when this returns.
            ctx.dump_checkpoint(str(place), blocking=False, extra=self.state_dict())
        _meet(ctx)  # the other ranks train after the snapshot

    def _finish(self, ctx: TrainCtx, *, stopped_early: bool) -> Fit:
        state = self._state
        if self.directory is not None:
            ctx.wait_for_dump_embedding()
            _meet(ctx)  # rank 0 has committed it
            if state.best_step is not None and not self._has_best:
                ctx.load_checkpoint(str(self.directory / "best"))
                if ctx.rank == 0:
                    self._console.print(f"loaded the best checkpoint, of step {ctx.step}")
        return Fit(state.step, state.best_step, state.best, stopped_early)

    def _log(self, ctx: TrainCtx, values: dict[str, float]) -> None:
        report(step=ctx.step, **values)
        for callback in self.callbacks if ctx.rank == 0 else ():
            callback.log(ctx.step, values)

    def _is_over(self, state: JobState) -> bool:
        return self._has_target(state) or (self.patience is not None and state.since_best >= self.patience)

    def _has_target(self, state: JobState) -> bool:
        if self.target is None or self.metric not in state.best:
            return False
        sign = 1 if _HIGHER_IS_BETTER[self.metric] else -1
        return sign * state.best[self.metric] >= sign * self.target

    def _left(self, ctx: TrainCtx) -> list[int]:
        """The number of batches that each rank has left. Of a job that is over it gets none."""
        trained, end = ctx._pipeline.trained, len(self.train) * self.epochs
        if self._is_over(self._state):
            # Data loaders ask the ranks, and leave all batches out.
            ctx._pipeline.start_after(DataPosition(((end,),)))
        return [trained.count_missing(rank, ctx.world_size, end) for rank in range(ctx.world_size)]

    def _resume(self, ctx: TrainCtx) -> None:
        """Continues after the newest checkpoint: that of the context's recovery, or of `directory`."""
        recovery, place, sizes = ctx.recovery, None, (len(self.train), len(self.schedulers))
        if recovery is not None:
            if not self.resume or all(holder is not self for holder in recovery.state.values()):
                raise FailedPreconditionError(
                    "the context has a recovery, which must store and resume this trainer: pass "
                    'Recovery(state={"trainer": trainer}), and leave out resume=False'
                )
            remedy = f"remove the directory {recovery.directory}"
            if self.directory is not None:
                remedy = f"remove both directories, {recovery.directory} and {self.directory}"
            if ctx.step:
                place = str(recovery.directory)
                self._state.check(*sizes, remedy)
            else:
                self._state = JobState()
        else:
            self._state, remedy = JobState(), "pass resume=False"
            found = newest(self.directory) if self.directory is not None and self.resume else None
            if found is None:
                # Of a checkpoint that the script has loaded: its batches are taken for those of other data.
                ctx._pipeline.start_after(DataPosition())
            else:
                place, state = str(found), read_state(found, remedy)
                check_position(found, remedy)
                state.check(*sizes, remedy)
                ctx.load_checkpoint(place)
                self._state = state
        if place is not None:
            for scheduler, scheduler_state in zip(self.schedulers, self._state.schedulers, strict=True):
                scheduler.load_state_dict(scheduler_state)
        if self.directory is not None and self.resume:
            self._state.take_best(self.directory, *sizes, remedy)
        # Not by steps: `last` may be of the same step as `best`, trained again after a restart.
        self._has_best = (
            recovery is None and self.directory is not None and place == str(self.directory / "best")
        )
        if place is not None and ctx.rank == 0:
            self._console.print(f"step {ctx.step}: resumed from {place}")


class _Share(IterableDataset):
    """Every `world_size`-th batch, for an evaluation."""

    def __init__(self, batches: Batches, rank: int, world_size: int) -> None:
        super().__init__()
        self._batches, self._rank, self._world_size = batches, rank, world_size

    def __iter__(self) -> Iterator[PersiaBatch]:
        for rows in islice(self._batches.read(), self._rank, None, self._world_size):
            yield self._batches.make(rows, requires_grad=False)


def _cross_entropy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return binary_cross_entropy_with_logits(output.reshape(label.shape), label)


def _end_together(ctx: TrainCtx, schedulers: Sequence[Any]) -> None:
    """Gives all ranks the step of the one that had the most batches."""
    if ctx.world_size == 1:
        return
    steps = torch.tensor([ctx.step], device=ctx.device)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    while ctx.step < int(steps):
        ctx.step += 1
        for scheduler in schedulers:
            scheduler.step()


def _meet(ctx: TrainCtx) -> None:
    """Returns when all ranks have called it."""
    if ctx.world_size > 1:
        dist.barrier()


def _share_buffers(model: torch.nn.Module) -> None:
    """Gives all ranks rank 0's buffers, as DDP does at the next step."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
