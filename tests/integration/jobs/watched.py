"""Trains until the loaders end, evaluates now and then, and reports: something to watch.

Early on it dumps a checkpoint that can be served, to the folder of its argument.
"""

from __future__ import annotations

import sys

import torch
from loader import make_batch

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.observability import report
from train import Model


def main() -> None:
    model = Model()
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.05),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.1, 0.1), seed=3),
        mixed_precision=False,
    ) as ctx:
        for step, batch in enumerate(DataLoader(StreamingDataset(10), embedding_staleness=4)):
            output, labels = ctx.forward(batch)
            assert labels is not None
            loss = torch.nn.functional.mse_loss(output, labels[0])
            ctx.backward(loss)
            report(step=step, loss=loss.item())
            if step % 10 == 0:
                with eval_ctx(model=model) as evaluation:
                    evaluation.forward(evaluation.get_embedding_from_data(make_batch(step)))
            if step == 10:
                ctx.dump_checkpoint(sys.argv[1], with_jit_model=True)
            if step == 20:
                print("under way", flush=True)


if __name__ == "__main__":
    main()
