"""The published methods of contexts that dump and load: torch state here, rows by the job's servers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from persia import env
from persia.checkpoint.checkpoints import EXTRA_NAME, DumpRequest, Source, described
from persia.config import SlotsConfig
from persia.config.slots_config import DENSE_MODE
from persia.ctx.ranks import done_by_rank_0
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Optimizer
from persia.errors import (
    ConfigError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PersiaError,
    UnavailableError,
)
from persia.job.batch_pipeline import BatchPipeline
from persia.job.embedded import read_slots
from persia.job.lost_rows import RowsGuard
from persia.job.runtime import JobRuntime
from persia.logger import get_default_logger
from persia.pipeline.exact import other_rows
from persia.pipeline.position import DataPosition
from persia.rows.beyond import warn_of_rows_beyond
from persia.storage import dense
from persia.storage.dense_slots import DenseMoves, DenseSlots, DenseSlotsOptimizer
from persia.storage.location import Location
from persia.storage.manifest import Manifest

_Path = str | os.PathLike[str]


class CheckpointMethods:
    """The methods of `EmbeddingCtx`. A training context adds its optimizers, and dumps on rank 0 alone."""

    runtime: JobRuntime
    _pipeline: BatchPipeline
    model: torch.nn.Module | None
    device: torch.device | None
    _slots: SlotsConfig | None
    _dense_slots: DenseSlots | None
    owns_runtime: bool

    def _find_dense_slots(self) -> DenseSlots | None:
        """The rows of slots in this context's model. A training context sets their initial values."""
        found, model = DenseSlots.find(self.model), self.model
        if self._slots is None and DENSE_MODE in self.runtime.backend.slot_modes:
            self._slots = read_slots(None)
            if self._slots is None:
                raise ConfigError(
                    "the job's embedding config places slots in the dense model, so a rank needs it: pass "
                    "slots=... to the context, or set PERSIA_EMBEDDING_CONFIG"
                )
            own, workers = self._slots.schema_hash(), self.runtime.backend.schema
            if workers and own != workers:
                raise FailedPreconditionError(
                    f"the embedding workers have the embedding config {workers}, this process {own}: give "
                    "both the same embedding config (--embedding-config, PERSIA_EMBEDDING_CONFIG or slots=)"
                )
        slots = self._slots if self.owns_runtime else None  # nested: another model, or has its rows
        if model is not None and slots is not None and (found is not None or slots.dense_slots):
            found = DenseSlots.attach(model, slots, self.device)
        return found

    def dump_checkpoint(
        self,
        dst_dir: _Path,
        dense_filename: str = "dense.pt",
        jit_dense_filename: str = "jit_dense.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
        *,
        step: int | None = None,
        keep_last: int | None = None,
        in_place: bool = False,
        extra: Any = None,
    ) -> None:
        """Writes the dense model and all embeddings to `dst_dir`: a directory, or a URL that fsspec knows.

        An older checkpoint there stays readable until the new one is complete, and is deleted then.
        `blocking=False` returns once every server has taken a snapshot, and `wait_for_dump_embedding` raises
        what fails later. A model that TorchScript cannot compile (InvalidArgumentError) costs nothing but its
        TorchScript.

        Args:
            step: of the training loop.
            keep_last: makes `dst_dir` a directory of checkpoints, named by `step`, of which so many are kept.
            in_place: for servers with storage tiers (docs/tiers.md). Rows stay there, and `dst_dir` gets the
                dense model and what ties it to them. Servers return to these rows; only they can load it.
            extra: state of the script, which `load_checkpoint` returns: tensors, numbers, strings, bytes,
                None, and lists, tuples and dicts of them. InvalidTypeError: anything else.
        """
        states = {dense_filename: self._require_model()}
        jit_name = jit_dense_filename if with_jit_model else None
        options = {"blocking": blocking, "step": step, "keep_last": keep_last, "in_place": in_place}
        self._dump(dst_dir, states, jit_name, extra, **options)

    def load_checkpoint(
        self,
        src_dir: _Path,
        map_location: Any = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
        *,
        strict: bool = True,
    ) -> Any:
        """Loads the dense model and all embeddings from `src_dir`, or from the newest checkpoint in it.

        Returns the `extra` of the dump; None: it had none.
        Everything is checked before anything is replaced; NotFoundError, CorruptionError name the file.
        `blocking=False` returns once it is checked, and the dense model replaced; servers replace their rows
        meanwhile, and `wait_for_load_embedding` raises what fails then. With `consistency="exact"` it waits.
        `strict=False` accepts that slots were added or removed since.
        """
        states = {dense_filename: self._require_model()}
        return self._load(src_dir, states, map_location, blocking=blocking, strict=strict)[1]

    def dump_embedding(
        self,
        dst_dir: _Path,
        blocking: bool = True,
        *,
        with_state: bool = True,
        step: int | None = None,
        keep_last: int | None = None,
        in_place: bool = False,
    ) -> None:
        """As `dump_checkpoint`, embeddings only; a dense model in `dst_dir` stays.

        `with_state=False` leaves the optimizer's state out: smaller, and enough to serve the rows.
        """
        self._dump(
            *(dst_dir, {}),
            blocking=blocking,
            with_state=with_state,
            step=step,
            keep_last=keep_last,
            in_place=in_place,
        )

    def load_embedding(
        self, src_dir: _Path, blocking: bool = True, *, strict: bool = True, with_state: bool = True
    ) -> None:
        """Replaces all embeddings by those of `src_dir`. NotFoundError: it has none.

        `with_state=False` begins with the optimizer's state of new rows: for rows that were dumped without,
        or trained with another kind of optimizer.
        """
        source = Source(src_dir)
        if not source.has_embeddings:
            raise NotFoundError(f"{source.location} has no embeddings: check the path")
        self._load_embeddings(source, blocking=blocking, strict=strict, fresh_state=not with_state)

    def wait_for_dump_embedding(self) -> None:
        """Waits for the last dump; raises its background error."""
        self.runtime.checkpoints.wait_for_dump()

    def wait_for_load_embedding(self) -> None:
        """Waits for the last load; raises its background error."""
        self.runtime.checkpoints.wait_for_load()

    def dump_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        dst_dir: _Path,
        file_name: str,
        is_jit: bool = False,
    ) -> None:
        """Writes a model's or an optimizer's state, or a model as TorchScript, to `dst_dir/file_name`."""
        if not is_jit:
            content = dense.state_bytes(torch_instance)
        elif isinstance(torch_instance, torch.nn.Module):
            content = dense.torchscript_bytes(torch_instance, file_name)
        else:
            raise InvalidArgumentError("is_jit is for models: an optimizer has no TorchScript")
        (Location.of(dst_dir) / file_name).replace(content)

    def load_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        src_dir: _Path,
        map_location: Any = None,
    ) -> None:
        """Reads what `dump_torch_state_dict` wrote; `src_dir` is the path of the file, as published."""
        # The published argument is a path of a file here, but that of a directory when it is written.
        file = Location.of(src_dir)
        content = Source(file.parent).dense(file.name)
        dense.load_state(torch_instance, content, str(file), map_location)

    def _dump(
        self,
        dst_dir: _Path,
        states: Mapping[str, dense.TorchState],
        jit_name: str | None = None,
        extra: Any = None,
        **options: Any,
    ) -> None:
        """`options`: those of `DumpRequest`."""
        _check_finite(states.values())
        self._pipeline.wait_for_gradients()  # the rows of a checkpoint have all of the training before it
        files = {name: dense.state_bytes(state) for name, state in states.items()}
        if extra is not None:
            files[EXTRA_NAME] = dense.extra_bytes(extra)
        failure: PersiaError | None = None
        if jit_name is not None:
            try:
                files[jit_name] = dense.torchscript_bytes(self._require_model(), jit_name)
            # Raised at the end: hours of training must not be lost for a model that TorchScript cannot
            # compile.
            except InvalidArgumentError as error:
                failure = error
        signature = self.runtime.signature
        self.runtime.checkpoints.dump(DumpRequest(dst_dir, dense=files, signature=signature, **options))
        if failure is not None:
            raise failure

    def _load(
        self,
        src_dir: _Path,
        states: Mapping[str, dense.TorchState],
        map_location: Any,
        *,
        blocking: bool = True,
        strict: bool = True,
    ) -> tuple[Manifest, Any]:
        """The manifest and the `extra` of the checkpoint."""
        source, moves = Source(src_dir), DenseMoves(self._dense_slots)
        # All files are read and their checksums compared before the first state is replaced.
        contents = {name: source.dense(name) for name in states}
        extra = source.extra()
        # The rows are loaded last and may be refused: model and optimizer must not be those of another
        # checkpoint.
        with dense.undone_on_error(list(states.values())):
            for name, state in states.items():
                what = str(source.location / name)
                dense.load_state(state, contents[name], what, map_location or self.device, moves.adapt)
            if self._dense_slots is not None and moves.without_values:
                self._begin_rows(self._dense_slots, moves.without_values)
            if source.has_embeddings:
                self._load_embeddings(source, blocking=blocking or bool(moves), strict=strict)
            else:
                get_default_logger().warning(
                    "%s has no embeddings: only the dense part is loaded", source.location
                )
            self._move(moves, source)
        # Later batches are matched with it. Where slots were added or removed the model has other inputs.
        if strict:
            self.runtime.signature = source.signature
        return source.manifest, extra

    def _move(self, moves: DenseMoves, source: Source) -> None:
        """Slots whose placement has changed since the dump, once the rows are loaded."""
        if not moves:
            return
        self._slots = self._slots or read_slots(None)
        if self._slots is None:
            raise FailedPreconditionError(
                "the checkpoint has slots in its dense model that this job has on servers, and moving them "
                "needs the job's slots: pass slots=... to the context, or set PERSIA_EMBEDDING_CONFIG"
            )
        for name, rows in moves.to_servers(self._slots).items():
            ids = np.arange(len(rows), dtype=np.uint64)
            self._on_rank_0(partial(self.runtime.backend.set_slot_rows, self._slots, name, ids, rows))
        section = source.manifest.embeddings
        if self._dense_slots is not None and moves.from_servers and section is not None:
            schema = section.schema
            # Servers may have another slot's rows under the signs of one that the checkpoint lacks.
            known = [name for name in moves.from_servers if schema is None or name in schema.slots]
            backend = self.runtime.backend
            slots = 1 << backend.slot_modes.index(DENSE_MODE)
            look_up = partial(backend.lookup_direct, requires_grad=False, slots=slots)
            self._dense_slots.copy_from(known, look_up)
            limits = {name: self._dense_slots.tables[name].cardinality for name in known}
            self._on_rank_0(partial(warn_of_rows_beyond, source.location, section, limits))

    def _begin_rows(self, slots: DenseSlots, firsts: Mapping[str, int]) -> None:
        """Sets rows that a load has no values for: zeros, as servers answer without training."""
        for name, first in firsts.items():
            slots.rows(name).detach()[first:] = 0

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        work()

    def _load_embeddings(self, source: Source, *, blocking: bool = True, **options: Any) -> None:
        """`options`: those of `Checkpoints.load`."""
        with self._other_rows():
            blocking = blocking or self.runtime.backend.num_exact > 0
            self.runtime.checkpoints.load(source, blocking=blocking, **options)

    def _wait_for_exact_batches(self) -> None:
        """Without it, rows could not be set or loaded right after a loop, whose last batches end later."""
        if self.runtime.backend.num_exact > 0:
            self._pipeline.wait_for_gradients()
            self._pipeline.reaper.wait(env.get_deadline_s())

    @contextlib.contextmanager
    def _other_rows(self) -> Iterator[None]:
        """While a load replaces the rows: no update may follow on the new ones."""
        self._pipeline.wait_for_gradients()
        self._wait_for_exact_batches()
        with other_rows(self.runtime.backend, "a checkpoint was loaded"):
            yield

    def _require_model(self) -> torch.nn.Module:
        if self.model is None:
            raise FailedPreconditionError("model not found, please init context with model")
        return self.model


class TrainingCheckpointMethods(CheckpointMethods):
    """The methods of `TrainCtx`: with the optimizers. Rank 0 dumps and loads the rows for all ranks."""

    rank: int
    world_size: int
    step: int
    dense_optimizer: torch.optim.Optimizer
    embedding_optimizer: Optimizer
    embedding_config: EmbeddingConfig
    _rows_guard: RowsGuard | None = None  # of a context that trains on servers

    def _find_dense_slots(self) -> DenseSlots | None:
        found = super()._find_dense_slots()
        if found is None:
            return None
        if self._slots is None:  # `fill` would replace what the servers answer, and train the rows here
            raise FailedPreconditionError(
                f"the model has the rows of {', '.join(found.tables)}, and the job's embedding config places "
                "no slot in the dense model: make the model anew, or pass slots=..."
            )
        if not found.has_values:  # else of a context before this one
            self._begin_rows(found)
        found.train_by(self.dense_optimizer)
        return found

    def _begin_rows(self, slots: DenseSlots, firsts: Mapping[str, int] | None = None) -> None:
        assert self._slots is not None, "a model with rows needs them"
        # Else some would be zeros, as admission is for rows on servers.
        config = dataclasses.replace(self.embedding_config, admit_probability=1.0, admit_after=1)
        slots.begin(self._slots, self.embedding_optimizer.train_config(config), firsts)

    def dump_checkpoint(  # type: ignore[override]  # the published names differ between the contexts
        self,
        dst_dir: _Path,
        dense_model_filename: str = "dense.pt",
        jit_dense_model_filename: str = "jit_dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
        *,
        step: int | None = None,
        keep_last: int | None = None,
        in_place: bool = False,
        extra: Any = None,
        on_error: Literal["raise", "log"] = "raise",
    ) -> None:
        """As `EmbeddingCtx.dump_checkpoint`, with the dense optimizer; `step` is this context's by default.

        All ranks hold the same dense part, and rank 0 writes: on the others this does nothing. The checkpoint
        says which batches of the data loaders all ranks have trained.

        `on_error="log"` is for dumps that are repeated: one that fails as the disk is full, or a rank, a
        server or the storage does not answer, is logged and counted in `counters.dumps_failed`, and training
        continues. With "raise", a rank that does not answer costs the checkpoint its position only.
        """
        states = self._states(dense_model_filename, opt_filename)
        jit_name = jit_dense_model_filename if with_jit_model else None
        options = {"blocking": blocking, "step": step, "keep_last": keep_last, "in_place": in_place}
        if on_error not in ("raise", "log"):
            raise InvalidArgumentError(f"on_error is {on_error!r}: choose 'raise' or 'log'")
        on_failure = None if on_error == "raise" else self._dump_failed
        self._dump(dst_dir, states, jit_name, extra, on_failure=on_failure, **options)

    def load_checkpoint(  # type: ignore[override]  # the published names differ between the contexts
        self,
        src_dir: _Path,
        map_location: Any = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        *,
        strict: bool = True,
    ) -> Any:
        """As `EmbeddingCtx.load_checkpoint`, with the dense optimizer and `step`. All ranks must call it.

        Called before the first batch, it has data loaders that call `DataCtx.resume` continue after the
        batches of the checkpoint.
        Hyper-parameters of the embedding optimizer stay those of this context.
        """
        states = self._states(dense_model_filename, opt_filename)
        manifest, extra = self._load(src_dir, states, map_location, blocking=blocking, strict=strict)
        # Evaluations and converted models write checkpoints that have no step.
        self.step = manifest.step or 0
        self._pipeline.start_after(manifest.trained or DataPosition())
        return extra

    def wait_for_load_embedding(self) -> None:
        """Waits until rank 0 has loaded everything; raises what has failed. All ranks must call it."""
        self._on_rank_0(super().wait_for_load_embedding)

    def _states(self, model_name: str, optimizer_name: str) -> dict[str, dense.TorchState]:
        optimizer: dense.TorchState = self.dense_optimizer
        if self._dense_slots is not None:
            optimizer = DenseSlotsOptimizer(self.dense_optimizer, self._dense_slots)
        return {model_name: self._require_model(), optimizer_name: optimizer}

    def _dump(self, *args: Any, **options: Any) -> None:
        if self.rank == 0:
            on_failure = options.get("on_failure")
            if not self._may_dump(on_failure):
                return
            if options.get("step") is None:
                options["step"] = self.step
            self._pipeline.wait_for_gradients()  # before the others are asked: they wait for theirs meanwhile
            trained: DataPosition | None = None
            try:
                trained = self._pipeline.position()
            except (UnavailableError, DeadlineExceededError) as failure:
                # A repeated dump must not replace checkpoints that have a position by one without.
                if on_failure is not None:
                    on_failure(failure)
                    return
                self._warn_without_position(failure)
            options |= {"optimizer": described(self.embedding_optimizer), "trained": trained}
            super()._dump(*args, **options)

    def _may_dump(self, on_failure: Callable[[PersiaError], None] | None) -> bool:
        """False: a server does not answer, which `on_failure` was told. Raises RowsLostError."""
        try:
            if self._rows_guard is not None:
                self._rows_guard.check()  # a good checkpoint must not be replaced by one without these rows
        except (UnavailableError, DeadlineExceededError) as failure:
            if on_failure is None:
                raise
            on_failure(failure)
            return False
        return True

    def _dump_failed(self, failure: PersiaError) -> None:
        self._pipeline.counters.add(dumps_failed=1)
        get_default_logger().error("a dump failed, and training continues until the next one: %s", failure)

    def _warn_without_position(self, failure: PersiaError) -> None:
        get_default_logger().warning(
            "the checkpoint of step %d does not say which batches are trained, and a job that loads it "
            "begins with the first one: %s",
            self.step,
            failure,
        )

    def _load_embeddings(self, source: Source, *, blocking: bool = True, **options: Any) -> None:
        missing = [] if self._rows_guard is None else self._rows_guard.missing()
        config = self.embedding_optimizer.train_config(self.embedding_config).encode()
        blocking = (
            blocking or self.runtime.backend.num_exact > 0
        )  # else batches would have rows of before the load
        options |= {"train_config": config, "blocking": blocking and self.world_size == 1}
        with self._other_rows():  # on every rank, not on rank 0 alone
            self._on_rank_0(partial(self.runtime.checkpoints.load, source, **options))
            if blocking:
                self.wait_for_load_embedding()
        if self._rows_guard is not None:
            self._rows_guard.loaded(missing)

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        if self.world_size > 1:
            done_by_rank_0(self.rank, work, self.device)
        else:
            work()


def _check_finite(states: Iterable[dense.TorchState]) -> None:
    """FailedPreconditionError: a weight is NaN or infinite. Buffers may be: masks often are."""
    for model in states:
        if not isinstance(model, torch.nn.Module):
            continue
        for name, weight in model.named_parameters():
            # Weights that are not trained may be infinite, as masks are; those of a lazy module do not exist
            # before its first forward.
            if is_lazy(weight) or not weight.requires_grad:
                continue
            if not torch.isfinite(weight.detach()).all():
                raise FailedPreconditionError(
                    f"the dense model's {name} has NaN or Inf, and its checkpoint would replace a good one: "
                    "load the last checkpoint, and train on with a lower learning rate"
                )
