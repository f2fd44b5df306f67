"""An optional training loop over contexts and data loaders: evaluation, checkpoints, resume, callbacks."""

from persia.data.striped import Batches
from persia.embedding.lr_schedule import WarmupPolynomialDecay
from persia.train.callbacks import Callback, MLflow, TensorBoard, WandB
from persia.train.trainer import Fit, Trainer

__all__ = ["Batches", "Callback", "Fit", "MLflow", "TensorBoard", "Trainer", "WandB", "WarmupPolynomialDecay"]
