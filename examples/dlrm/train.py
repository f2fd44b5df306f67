"""Trains a click model on Parquet files: `python train.py` in one process. README.md shows a cluster."""

from pathlib import Path

import torch

from persia import TrainCtx, optim
from persia.data import ParquetBatches
from persia.train import Trainer

HERE = Path(__file__).parent
FILES = str(HERE / "criteo")  # a file, a directory or a pattern
LABELS = ["label"]  # 0 or 1
DENSE = [f"I{i}" for i in range(1, 14)]  # numbers; a null is 0
IDS = [f"C{i}" for i in range(1, 27)]  # integers, strings, or lists of them: slots of embedding_config.yml
DIM = 16  # of each slot there

train, valid = ParquetBatches(FILES, labels=LABELS, dense=DENSE, ids=IDS, batch_size=1024).split(0.1)
trainer = Trainer(train, valid, directory=str(HERE / "checkpoints"), epochs=3, patience=2)


class Model(torch.nn.Module):
    """DLRM: dot products of all pairs of embeddings and of a vector made of the dense columns."""

    def __init__(self) -> None:
        super().__init__()
        count = len(IDS) + bool(DENSE)
        self.bottom = torch.nn.Linear(len(DENSE), DIM) if DENSE else None
        self.first, self.second = torch.triu_indices(count, count, offset=1)
        self.top = torch.nn.Sequential(
            torch.nn.Linear(count * DIM + len(self.first), 128),
            *(torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, len(LABELS))),
        )

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        if self.bottom is not None:
            embeddings = [self.bottom(dense[0].sign() * dense[0].abs().log1p()), *embeddings]
        vectors = torch.stack(embeddings, dim=1)  # [batch, count, DIM]
        dots = (vectors @ vectors.transpose(1, 2))[:, self.first, self.second]
        return self.top(torch.cat([vectors.flatten(1), dots], dim=1))  # a logit for each label


def main() -> None:
    model = Model()
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    slots = str(HERE / "embedding_config.yml")
    with TrainCtx(optim.Adagrad(lr=0.05), dense_optimizer, model=model, slots=slots) as ctx:
        trainer.fit(ctx)


if __name__ == "__main__":
    main()
