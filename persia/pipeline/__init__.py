"""The path of a batch, from the loader to the acknowledged update; a stage has one or several files.

In the order of docs/architecture.md: `send` (the loader registers ID features at an embedding worker and
submits the batch to a rank), `receive` and `source` (the rank takes it), `prefetch` and `lookup` (rows are
looked up ahead of the loop, within the bounds of `staleness`), `batch` (tensors for the model) and
`gradients` (their return). `backend` makes the calls to the embedding workers. `lease` sees to it that every
looked-up batch is either updated or given up, `counters` counts it, and `queues` connect the threads.
"""
