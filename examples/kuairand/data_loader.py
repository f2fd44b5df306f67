"""The data loader: sends the training file once, in the order of time; replica i of n every n-th batch."""

from __future__ import annotations

import clicks
from job_settings import Settings
from persia.ctx import DataCtx
from persia.env import get_replica_index, get_replica_size


def main() -> None:
    settings = Settings.from_environment()
    log = clicks.read(settings.data, clicks.TRAIN, settings.max_rows)
    first, step = get_replica_index() or 0, get_replica_size() or 1
    with DataCtx() as ctx:
        for index in range(first, log.num_batches(settings.batch_size), step):
            ctx.send_data(log.batch(index, settings.batch_size).to_persia_batch(requires_grad=True))


if __name__ == "__main__":
    main()
