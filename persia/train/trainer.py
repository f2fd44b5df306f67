"""The training loop: trains, evaluates, keeps the best checkpoint, stops early, and resumes where it was.

A batch carries its number in the job in `meta`. A checkpoint stores which numbers were trained, so that a
resumed job trains the other ones, each once, whatever its number of ranks and data loaders.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from persia import env
from persia.ctx import DataCtx, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.data.striped import Batches, of_epoch
from persia.embedding.checks import at_least, checked_number
from persia.embedding.data import PersiaBatch
from persia.errors import FailedPreconditionError, InvalidArgumentError, InvalidTypeError
from persia.job.connection import JobConnection
from persia.logger import get_default_logger
from persia.messaging.subjects import NN_WORKER
from persia.nn import ClickMetrics, ClickQuality
from persia.nn.replicas import gather_ragged
from persia.observability import report
from persia.storage.location import Location
from persia.train.callbacks import Callback
from persia.train.state import JobState, StateFile

__all__ = ["Batches", "Fit", "Trainer"]

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
        train: the batches of one epoch; `len(train) * epochs % ranks` batches at the end are left out.
        valid: held-out batches for the evaluations; None: there are none, only checkpoints.
        directory: path or URL of the checkpoints, visible to all processes. `best` in it has the best metric,
            `last` the newest if that is another one. None: no checkpoints.
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
            checkpoint of the new job replaces those of the old one.

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
        self._states = None if self.directory is None else StateFile(self.directory)
        self._begin: JobState | None = None  # of the run of `fit` in this process
        self._clears = False  # the next checkpoint replaces those of another job

    def load(self, data: DataCtx | None = None) -> None:
        """Sends the batches that are still to train: the whole of a data loader script.

        In one process `fit` calls it. In a cluster each data loader sends its share. A data loader that is
        restarted sends the batches of the run again, in the same order; ranks drop those they have.

        Args:
            data: the context of a script that needs its `world_size` to make `train`; None: a new one.
        """
        with DataCtx() if data is None else nullcontext(data) as data:
            state = self._begin or self._stored(_run(data.connection))[0]
            count = 0 if self._is_over(state) else self._num_left(state, data.world_size)
            for position, (number, batches, rows) in enumerate(islice(self._left(state), count)):
                if position % data.replica_size == data.replica_index:
                    # The loaders' number: a checkpoint that one of them has not seen would be another split.
                    meta = json.dumps([state.step, number, data.replica_index, data.replica_size]).encode()
                    data.send_data(batches.make(rows, requires_grad=True, meta=meta))

    def fit(self, ctx: TrainCtx, **loader_options: Any) -> Fit:
        """Trains until the data ends or the metric stops improving; then loads the best checkpoint.

        All ranks call it once inside their context. `loader_options` are those of `DataLoader`, such as
        `embedding_staleness=16`. Without `directory` the model stays as it is after the last step.

        Raises FailedPreconditionError for batches that `load` did not send or that continue from another
        checkpoint than this rank, for checkpoints of other data, and for a context with a `recovery`.
        """
        state = self._resume(ctx)
        state.began_at, self._clears = state.step, not self.resume
        if ctx.rank == 0:
            state.run = _run(ctx.runtime.connection)
        self._begin = replace(state)
        every = self.evaluate_every or -(-len(self.train) // ctx.world_size)
        evaluated_at, is_due = state.step, False
        trained, loaders = set[int](), set[int]()  # by this rank since the last evaluation; seen so far
        sums = torch.zeros(2, device=ctx.device)  # of finite losses, and their number
        with ExitStack() as resources:
            for callback in self.callbacks if ctx.rank == 0 else ():
                callback.start()
                resources.callback(callback.end)
            is_hidden = ctx.rank > 0 or not self._console.is_terminal
            bar = resources.enter_context(Progress(console=self._console, disable=is_hidden))
            steps = self._num_left(state, ctx.world_size) // ctx.world_size
            task = bar.add_task("training", total=state.step + steps, completed=state.step)
            for batch in DataLoader(StreamingDataset(loader=self.load), **loader_options):
                number, loader, num_loaders = _origin(batch.meta, state.began_at)
                output, labels = ctx.forward(batch)
                assert labels is not None, "only inference has none"
                loss = self.loss(output, labels[0])
                ctx.backward(loss)
                for scheduler in self.schedulers:
                    scheduler.step()
                trained.add(number)
                loaders.add(loader)
                loss = loss.detach().float().reshape(())
                sums += torch.stack([loss.nan_to_num(0.0, 0.0, 0.0), loss.isfinite()])
                bar.update(task, completed=ctx.step)
                if ctx.step % self.log_every == 0:
                    mean = (sums[0] / sums[1]).item()
                    self._log(ctx, {"loss": mean})
                    bar.update(task, description=f"loss {mean:.4f}")
                    sums.zero_()
                # Loaders read the newest checkpoint when they start: the first new one waits for all of them.
                is_due = is_due or ctx.step % every == 0
                if is_due and len(_gathered(ctx, loaders)) == num_loaders:
                    self._evaluate(ctx, state, trained)
                    evaluated_at, trained, is_due = ctx.step, set(), False
                    if self._is_over(state):
                        break
            if evaluated_at != ctx.step:
                self._evaluate(ctx, state, trained)
        return self._finish(ctx, state)

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

    def _evaluate(self, ctx: TrainCtx, state: JobState, trained: set[int]) -> None:
        """Evaluates and writes a checkpoint. All ranks call it, at the same step."""
        ctx.wait_for_gradients()
        # Returns when all ranks are here: no row changes until they train again.
        state.add(_gathered(ctx, trained))
        state.step, state.batches = ctx.step, len(self.train)
        state.take_schedulers(self.schedulers)
        if self.valid is not None:
            quality = asdict(self.evaluate(ctx, self.valid)).items()
            values = {name: float(value) for name, value in quality if value is not None}
            self._log(ctx, values)
            sign = 1 if _HIGHER_IS_BETTER[self.metric] else -1
            best, value = sign * state.best.get(self.metric, -sign * math.inf), sign * values[self.metric]
            is_best = value > best
            if is_best:
                state.best_step, state.best, state.since_best = ctx.step, values, 0
            elif not math.isnan(value):
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
                if self._is_over(state) and self._num_left(state, ctx.world_size):
                    why = f"{self.metric} was best at step {state.best_step} (patience={self.patience})"
                    if self._has_target(state):
                        why = f"{self.metric} is that of target={self.target} or better"
                    self._console.print(f"step {ctx.step}: stopped early, as {why}")
        if self.directory is not None and self._states is not None and ctx.rank == 0:
            # First, and under its step: whichever checkpoint is committed has its state.
            if self._clears:
                self._states.clear()
                self._clears = False
            self._states.add(state)
            place = self.directory / ("best" if state.best_step == ctx.step else "last")
            ctx.dump_checkpoint(str(place), blocking=False)  # it has its snapshot when this returns
        _gathered(ctx, set())  # the other ranks train after the snapshot

    def _finish(self, ctx: TrainCtx, state: JobState) -> Fit:
        if self.directory is not None:
            ctx.wait_for_dump_embedding()
            _gathered(ctx, set())  # rank 0 has committed it
            if state.best_step is not None and state.best_step != ctx.step:
                ctx.load_checkpoint(str(self.directory / "best"))
                if ctx.rank == 0:
                    self._console.print(f"loaded the best checkpoint, of step {ctx.step}")
        left = self._num_left(state, ctx.world_size)
        return Fit(state.step, state.best_step, state.best, stopped_early=self._is_over(state) and left > 0)

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

    def _num_left(self, state: JobState, world_size: int) -> int:
        """Batches to send, the same number for every rank."""
        count = max(0, len(self.train) * self.epochs - state.next - len(state.done))
        return count - count % world_size

    def _left(self, state: JobState) -> Iterator[tuple[int, Batches, Any]]:
        """Number, batches of the epoch, and raw data of each batch that is not trained."""
        number, done = state.next, set(state.done)
        while number < len(self.train) * self.epochs:
            epoch, first = divmod(number, len(self.train))
            batches = of_epoch(self.train, epoch)  # makes them too: `read` may yield mere positions
            for rows in batches.read(first):
                if number not in done:
                    yield number, batches, rows
                number += 1

    def _stored(self, run: str = "") -> tuple[JobState, Location | None]:
        if self._states is None or not self.resume:
            return JobState(), None
        return self._states.newest(len(self.train), run)

    def _resume(self, ctx: TrainCtx) -> JobState:
        if ctx.recovery is not None:
            raise FailedPreconditionError(
                "the context has a recovery, and a Trainer resumes from its own checkpoints: leave out "
                "TrainCtx(recovery=...), and pass Trainer(directory=...)"
            )
        state, place = self._stored()
        if place is not None:
            ctx.load_checkpoint(str(place))
            state.give_schedulers(self.schedulers)
            if ctx.rank == 0:
                self._console.print(f"step {state.step}: resumed from {place}")
        return state


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


def _origin(meta: bytes | None, began_at: int) -> tuple[int, int, int]:
    """Number of a batch in the job, its loader, and the number of loaders."""
    if meta is None:
        raise FailedPreconditionError(
            "a batch has no number in the job: let the data loader script call load() of the same Trainer"
        )
    step, number, loader, num_loaders = json.loads(meta)
    if step != began_at:
        raise FailedPreconditionError(
            f"data loader {loader} continues from the checkpoint of step {step}, this rank from that of step "
            f"{began_at}: let all processes see the same directory=, and start them together"
        )
    return number, loader, num_loaders


def _gathered(ctx: TrainCtx, numbers: set[int]) -> set[int]:
    """The union over all ranks; returns when all have called it."""
    if ctx.world_size == 1:
        return numbers
    assert dist.group.WORLD is not None, "ranks have one"
    found = gather_ragged(torch.tensor(sorted(numbers), dtype=torch.int64), dist.group.WORLD)
    return set(torch.cat(found).tolist())


def _share_buffers(model: torch.nn.Module) -> None:
    """Gives all ranks rank 0's buffers, as DDP does at the next step."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def _run(connection: JobConnection | None) -> str:
    """Identity of the run: rank 0's incarnation, which changes when it is restarted."""
    if connection is None:
        return ""
    return f"{connection.directory.wait_for(NN_WORKER, env.get_deadline_s())[0].incarnation:016x}"
