"""Where a `Trainer` sends its numbers. A logger is used by its own library, imported when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia.optional import needs


class Callback:
    """Subclass it and override what you need. Its methods are called on rank 0 only."""

    def start(self) -> None:
        """Called before the first batch."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Called with the training loss every `log_every` steps, and with the metrics of each evaluation.

        `values` has the key `loss`, or those of `persia.nn.ClickQuality.values()`: counts of samples are int.
        """

    def end(self) -> None:
        """Called after the last step, also if training failed, if `start` has returned."""


class TensorBoard(Callback):
    """Writes event files to `folder`, by `torch.utils.tensorboard`. Needs `pip install tensorboard`."""

    def __init__(self, folder: str = "runs") -> None:
        self.folder = folder

    def start(self) -> None:
        with needs("tensorboard cannot be imported", "tensorboard"):
            import tensorboard  # noqa: F401  # torch's own error does not name the package
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(self.folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()


class WandB(Callback):
    """Logs to Weights & Biases; `settings` are the arguments of `wandb.init`. Needs `pip install wandb`."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def start(self) -> None:
        with needs("wandb cannot be imported", "wandb"):
            import wandb
        self._run = wandb.init(**self.settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        self._run.finish()


class MLflow(Callback):
    """Logs to MLflow, under the name `experiment` if there is one; `settings` are the arguments of
    `mlflow.start_run`. Needs `pip install mlflow`."""

    def __init__(self, experiment: str | None = None, **settings: Any) -> None:
        self.experiment, self.settings = experiment, settings

    def start(self) -> None:
        with needs("mlflow cannot be imported", "mlflow"):
            import mlflow
        self._mlflow = mlflow
        if self.experiment is not None:
            self._mlflow.set_experiment(self.experiment)
        self._mlflow.start_run(**self.settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def end(self) -> None:
        self._mlflow.end_run()
