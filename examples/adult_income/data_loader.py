"""The data loader: streams the training data, once and in file order, into the job.

Several replicas share the work: replica i of n sends the batches i, i + n, i + 2n, ... . The context numbers
batches in just that way, so the order in reproducible mode is the file's order for any number of replicas.
"""

from __future__ import annotations

from batches import to_persia_batch
from dataset import load_split
from persia.ctx import DataCtx
from persia.env import get_replica_index, get_replica_size
from settings import Settings


def main() -> None:
    settings = Settings.from_environment()
    if settings.prepared_batches:
        print("ADULT_PREPARED_BATCHES: the ranks make their batches themselves, nothing to send", flush=True)
        return
    batches = load_split(settings.data, "train").training_batches(settings.recipe)
    replica_index, replica_size = get_replica_index() or 0, get_replica_size() or 1
    with DataCtx() as ctx:
        for batch in batches[replica_index::replica_size]:
            ctx.send_data(to_persia_batch(batch, requires_grad=True))


if __name__ == "__main__":
    main()
