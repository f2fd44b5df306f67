"""The training loop: trains, evaluates, keeps the best checkpoint, stops early, and resumes where it was.

Its checkpoints are those of the context, with the position of the data. Its own state is their `extra`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch.nn.functional import binary_cross_entropy_with_logits

from persia.checkpoint.checkpoints import Source, newest_of
from persia.ctx import DataCtx, TrainCtx, evaluate
from persia.ctx.evaluation import wait_for_updates
from persia.ctx.ranks import extremes, meet
from persia.data import Batches, DataLoader, PersiaTrainingBatch, StreamingDataset, StripedBatches
from persia.embedding.checks import at_least
from persia.embedding.lr_schedule import check_steps_alone
from persia.errors import FailedPreconditionError, InvalidArgumentError
from persia.nn import EarlyStopping
from persia.observability import report
from persia.pipeline.position import DataPosition
from persia.storage.location import Location
from persia.train.callbacks import Callback

_LOADS_ROWS = "ctx.load_checkpoint() loads the model and its rows"


@dataclass(frozen=True)
class Fit:
    """What `Trainer.fit` has done."""

    step: int  # batches that this rank had trained at the end, those before a resume included
    best_step: int | None  # of the best evaluation, whose model and rows the context has; None: no evaluation
    best: dict[str, float]  # `ClickQuality.values()` of that evaluation: its counts of samples are int
    stopped_early: bool
    waited_s: float = field(default=0.0, compare=False)  # for batches to train, the first one included


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
        metric, target, patience: which evaluation is the best, and when to stop: see `EarlyStopping`.
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

    metric = property(attrgetter("stopping.metric"))  # as the arguments; they cannot be set
    target = property(attrgetter("stopping.target"))
    patience = property(attrgetter("stopping.patience"))
    evaluate = staticmethod(evaluate)  # persia.ctx.evaluate

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
        for name, limit in (("patience", patience), ("target", target)):
            if limit is not None and valid is None:
                raise InvalidArgumentError(f"{name}={limit} needs valid=, the batches to evaluate on")
        for name, batches in (("train", train), ("valid", valid)):
            if batches is not None and not len(batches):
                raise InvalidArgumentError(f"{name} has no batches: pass at least one")
        check_steps_alone(schedulers)
        at_least(1, "evaluate_every", 1 if evaluate_every is None else evaluate_every)
        self.train, self.valid, self.loss = train, valid, loss or _cross_entropy
        self.evaluate_every, self.resume = evaluate_every, resume
        self.directory = None if directory is None else Location.of(directory)
        self.epochs, self.log_every = at_least(1, "epochs", epochs), at_least(1, "log_every", log_every)
        self.schedulers, self.callbacks = list(schedulers), list(callbacks)
        self.stopping = EarlyStopping(metric, patience=patience, target=target)
        self._evaluated = 0  # the step of the last evaluation
        self._loaded: Mapping[str, Any] = {}  # by a recovery, for the next `fit`
        # Of the best evaluation and of the newest one: where checkpoints are.
        self._places = [] if self.directory is None else [self.directory / name for name in ("best", "last")]
        self._has_best = False  # the context has the model of the best evaluation
        self._console = Console(soft_wrap=True, highlight=False)

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
        self._console.quiet = ctx.rank > 0  # a bar would still redirect what the script prints, and lose it
        self._clears = not self.resume  # the next checkpoint replaces those of another job
        self._resume(ctx)
        stopping, trained, num_batches = self.stopping, ctx._pipeline.trained, len(self.train) * self.epochs
        if stopping.reason:  # data loaders ask the ranks, and leave all batches out
            ctx._pipeline.start_after(DataPosition(((num_batches,),)))
        left = [trained.count_missing(rank, ctx.world_size, num_batches) for rank in range(ctx.world_size)]
        end, all_train_until = ctx.step + max(left), ctx.step + min(left)
        every = self.evaluate_every or -(-len(self.train) // ctx.world_size)
        batches = DataLoader(StreamingDataset(loader=self.load), **loader_options)
        sums = torch.zeros(2, device=ctx.device)  # of finite losses, and their number
        with ExitStack() as resources:
            for callback in self.callbacks if ctx.rank == 0 else ():
                callback.start()
                resources.callback(callback.end)
            bar = Progress(console=self._console, disable=ctx.rank > 0 or not self._console.is_terminal)
            resources.enter_context(bar)
            task = bar.add_task("training", total=end, completed=ctx.step)
            for batch in batches:
                self._train(ctx, batch, sums)
                bar.update(task, completed=ctx.step)
                if ctx.step % self.log_every == 0:
                    self._log(ctx, {"loss": (mean := (sums[0] / sums[1]).item())})
                    bar.update(task, description=f"loss {mean:.4f}")
                    sums.zero_()
                # A rank that has no more batches takes part in no evaluation until all have ended.
                if ctx.step % every == 0 and ctx.step <= all_train_until:
                    self._evaluate(ctx, end)
                    if stopping.reason:
                        break
            self._end_together(ctx)
            if self._evaluated != ctx.step:
                self._evaluate(ctx, end)
        if self._places:
            ctx.wait_for_dump_embedding()
            meet(ctx.world_size)  # rank 0 has committed it
            if stopping.best_step is not None and not self._has_best:
                ctx.load_checkpoint(str(self._places[0]))
                self._console.print(f"loaded the best checkpoint, of step {ctx.step}")
        stopped_early = stopping.reason is not None and self._evaluated < end
        return Fit(self._evaluated, stopping.best_step, stopping.best, stopped_early, batches.waited_s)

    def state_dict(self) -> dict[str, Any]:
        """What has been evaluated, and the states of the schedulers: for `Recovery(state=...)`."""
        if self._loaded:  # a checkpoint before `fit` has what was loaded
            return dict(self._loaded)
        schedulers = [scheduler.state_dict() for scheduler in self.schedulers]
        job = {"step": self._evaluated, "batches": len(self.train), "schedulers": schedulers}
        return job | self.stopping.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Called by a context with a `recovery`. `fit` checks and uses what it has."""
        self._loaded = state_dict

    def _train(self, ctx: TrainCtx, batch: PersiaTrainingBatch, sums: torch.Tensor) -> None:
        """One step; adds its loss to `sums`."""
        if not ctx._pipeline.data_resumes:
            raise FailedPreconditionError(
                "the data loader did not ask which batches are trained: let its script call load() of the "
                "same Trainer"
            )
        output, labels = ctx.forward(batch)
        assert labels is not None, "only inference has none"
        ctx.backward(loss := self.loss(output, labels[0]))
        for scheduler in self.schedulers:
            scheduler.step()
        loss = loss.detach().float().reshape(())
        sums += torch.stack([loss.nan_to_num(0.0, 0.0, 0.0), loss.isfinite()])

    def _end_together(self, ctx: TrainCtx) -> None:
        """Gives all ranks the step of the one that had the most batches."""
        _, last = extremes(ctx.step, ctx.world_size, ctx.device)
        for scheduler in self.schedulers * (last - ctx.step):
            scheduler.step()
        ctx.step = last

    def _evaluate(self, ctx: TrainCtx, end: int) -> None:
        """Evaluates and writes a checkpoint. All ranks call it, at the same step; the last step is `end`."""
        self._evaluated, self._has_best = ctx.step, False
        # Both wait for the updates of all ranks: no row changes until all train again.
        if self.valid is None:
            wait_for_updates(ctx)
        else:
            quality = self.evaluate(ctx, self.valid)
            self._log(ctx, quality.values())
            self._has_best = self.stopping.update(ctx.step, quality)
            self._console.print(f"step {ctx.step}: {quality.summary()}{' (best)' if self._has_best else ''}")
            if self.stopping.reason and ctx.step < end:
                self._console.print(f"step {ctx.step}: stopped early, as {self.stopping.reason}")
        if self._places and ctx.rank == 0 and (self._has_best or ctx.recovery is None):
            for place in self._places if self._clears else ():
                place.remove()
            self._clears = False
            place = self._places[0 if self._has_best else 1]
            ctx.dump_checkpoint(str(place), blocking=False, extra=self.state_dict())
        meet(ctx.world_size)  # rank 0 has its snapshot: no row may change before

    def _log(self, ctx: TrainCtx, values: dict[str, float]) -> None:
        report(step=ctx.step, **values)
        for callback in self.callbacks if ctx.rank == 0 else ():
            callback.log(ctx.step, values)

    def _resume(self, ctx: TrainCtx) -> None:
        """Continues after the newest checkpoint: that of the context's recovery, or of `directory`."""
        recovery, place, remedy = ctx.recovery, None, "pass resume=False"
        loaded, self._loaded = self._loaded, {}
        places = self._places if self.resume else []
        if recovery is not None:
            if not self.resume or all(holder is not self for holder in recovery.state.values()):
                raise FailedPreconditionError(
                    "the context has a recovery, which must store and resume this trainer: pass "
                    'Recovery(state={"trainer": trainer}), and leave out resume=False'
                )
            remedy = f"remove the directory {recovery.directory}"
            if places:
                remedy = f"remove both directories, {recovery.directory} and {self.directory}"
            if ctx.step:  # it has loaded the state
                place = Location.of(recovery.directory)
                self._check(loaded, Source(place), remedy)
        elif (source := newest_of(places)) is None:
            # Of a checkpoint that the script has loaded: its batches are taken for those of other data.
            ctx._pipeline.start_after(DataPosition())
        else:
            place, loaded = source.location, self._check(source.extra(), source, remedy)
            source.check_position(f"use another directory, or {remedy}; {_LOADS_ROWS}")
            ctx.load_checkpoint(str(place))
        self._evaluated = 0
        self.stopping.reset()
        if place is not None:
            self._evaluated = loaded["step"]
            self.stopping.load_state_dict(loaded)
            for scheduler, state in zip(self.schedulers, loaded["schedulers"], strict=True):
                scheduler.load_state_dict(state)
            self._console.print(f"step {ctx.step}: resumed from {place}")
        if places:
            best = newest_of(places[:1])
            self.stopping.take_best({} if best is None else self._check(best.extra(), best, remedy))
        # Not by steps: `last` may be of the same step as `best`, trained again after a restart.
        self._has_best = place in places[:1]

    def _check(self, state: Any, source: Source, remedy: str) -> dict[str, Any]:
        """`state`, of a checkpoint. FailedPreconditionError: it is of another job, or no trainer wrote it."""
        if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
            raise FailedPreconditionError(
                f"{source.location} is a checkpoint of step {source.manifest.step} that no Trainer of this "
                "version wrote (earlier ones kept their progress in trainer.json): finish the job with the "
                f"version that began it, use another directory, or {remedy}; {_LOADS_ROWS}"
            )
        if state["batches"] != len(self.train):
            raise FailedPreconditionError(
                f"the checkpoint is of {state['batches']} batches an epoch, train has {len(self.train)} "
                f"batches: use the same files and batch_size, another directory, or {remedy}"
            )
        if len(state["schedulers"]) != len(self.schedulers):
            raise FailedPreconditionError(
                f"the checkpoint has the states of {len(state['schedulers'])} schedulers, "
                f"schedulers= has {len(self.schedulers)}: pass the same, or {remedy}"
            )
        return state


def _cross_entropy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return binary_cross_entropy_with_logits(output.reshape(label.shape), label)
