"""`persia-launcher serve`: predictions of a checkpoint over gRPC."""

from __future__ import annotations

import click

from persia.launcher.server_options import port_or_off

__all__ = ["command"]


@click.command("serve")
@click.argument("checkpoint")
@click.option("--model-name", default="model", show_default=True, help="What requests call it.")
@click.option(
    "--embedding-config",
    envvar="PERSIA_EMBEDDING_CONFIG",
    show_envvar=True,
    metavar="FILE",
    help="Slots of the job that wrote the checkpoint (YAML). Needed to load rows into this process.",
)
@click.option(
    "--embedding-worker",
    "workers",
    multiple=True,
    metavar="HOST:PORT",
    help="Take rows from this embedding worker instead of the checkpoint; give it once for each worker.",
)
@click.option(
    "--host",
    envvar="PERSIA_BIND_HOST",
    show_envvar=True,
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Requests are not authenticated: 0.0.0.0 only in a network you trust.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="0 takes a free one."
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(1, 65535),
    default=1024,
    show_default=True,
    help="Samples computed at once; requests that wait together are computed together.",
)
@click.option(
    "--max-delay-ms",
    type=click.FloatRange(0, 1000),
    default=0.0,
    show_default=True,
    help="How long a request may wait for others to be computed with.",
)
@click.option(
    "--max-queued",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Requests that may wait; more are refused with RESOURCE_EXHAUSTED.",
)
@click.option(
    "--max-request-mib", type=click.IntRange(1, 1024), default=16, show_default=True, help="Of one request."
)
@click.option(
    "--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="Batches computed at a time."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.001),
    default=10.0,
    show_default=True,
    help="Seconds for a request; its own deadline counts where it is earlier.",
)
@click.option(
    "--poll",
    type=click.FloatRange(min=0.05),
    default=1.0,
    show_default=True,
    help="Seconds between two looks for a new version.",
)
@click.option(
    "--sample",
    type=click.Path(exists=True, dir_okay=False),
    help="A file with PersiaBatch.to_bytes(): a version that cannot answer it is not used.",
)
@click.option(
    "--incremental-dir",
    metavar="DIR|URL",
    help="Follow the packets that a training writes there (enable_incremental_update).",
)
@click.option(
    "--incremental-poll",
    type=click.FloatRange(min=0.01),
    default=0.25,
    show_default=True,
    help="Seconds between two looks for a new packet.",
)
@click.option(
    "--max-packets-behind",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Load a checkpoint instead of applying more packets than these.",
)
@click.option(
    "--server-status",
    "servers",
    multiple=True,
    metavar="HOST:PORT",
    help="Metrics port of a parameter server behind the embedding workers, once for each: a packet's dense "
    "model answers only when all of them have its rows.",
)
@click.option(
    "--metrics-port",
    callback=port_or_off,
    envvar="PERSIA_METRICS_PORT",
    show_envvar=True,
    default="0",
    show_default=True,
    metavar="PORT|off",
    help="Port of /metrics, /status, /healthz and /readyz, on the same address; 0 takes a free one.",
)
@click.option(
    "--nats-url",
    envvar="PERSIA_NATS_URL",
    show_envvar=True,
    metavar="URL",
    help="Broker of the job (PERSIA_JOB_NAME) to be shown in by persia-launcher status. Not needed to serve.",
)
@click.option(
    "--replica-index",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of this server in that job, from 0.",
)
@click.option(
    "--replica-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of servers in that job.",
)
@click.option("--device-id", type=click.IntRange(min=0), help="CUDA device of the model; default: the CPU.")
def command(
    checkpoint: str,
    model_name: str,
    embedding_config: str | None,
    workers: tuple[str, ...],
    host: str,
    port: int,
    max_batch_size: int,
    max_delay_ms: float,
    max_queued: int,
    max_request_mib: int,
    threads: int,
    timeout: float,
    poll: float,
    sample: str | None,
    metrics_port: int | None,
    nats_url: str | None,
    replica_index: int,
    replica_size: int,
    incremental_dir: str | None,
    incremental_poll: float,
    max_packets_behind: int,
    servers: tuple[str, ...],
    device_id: int | None,
) -> None:
    """Answer requests with the predictions of CHECKPOINT, over gRPC (Open Inference Protocol, KServe v2).

    \b
    CHECKPOINT is a directory or URL that dump_checkpoint(..., with_jit_model=True) wrote. Of a directory of
    checkpoints the one that `latest` names is served, and the next one when it changes, without a pause.
      persia-launcher serve model/ --embedding-config embedding_config.yml
      persia-launcher serve model/ --embedding-worker host1:8887 --embedding-worker host2:8887
    With --incremental-dir it follows a running training, seconds behind; checkpoints are then for beginning,
    and for what it cannot follow. A file `pin` beside the packets, written like their `latest`, holds it at
    one, or brings it back there:
      persia-launcher serve model/ --embedding-config embedding_config.yml --incremental-dir packets/
    """
    from pathlib import Path

    import torch

    from persia.config import load_embedding_config
    from persia.packets.follower import FollowOptions
    from persia.serving.batcher import BatchingOptions
    from persia.serving.embeddings import RemoteRows
    from persia.serving.server import ServingOptions, serve
    from persia.serving.versions import ModelSettings
    from persia.storage.location import Location

    slots = load_embedding_config(embedding_config) if embedding_config and not workers else None
    settings = ModelSettings(
        name=model_name,
        location=Location.of(checkpoint),
        slots=slots,
        embeddings=RemoteRows(workers, deadline_s=timeout) if workers else None,
        device=None if device_id is None else torch.device("cuda", device_id),
        sample=None if sample is None else Path(sample).read_bytes(),
        poll_s=poll,
        servers=servers,
        follow=None
        if incremental_dir is None
        else FollowOptions(
            packets=Location.of(incremental_dir),
            checkpoints=Location.of(checkpoint),
            poll_s=incremental_poll,
            max_behind=max_packets_behind,
        ),
    )
    batching = BatchingOptions(
        max_batch_size=max_batch_size,
        max_delay_s=max_delay_ms / 1000,
        max_queued=max_queued,
        num_threads=threads,
    )
    serve(
        settings,
        ServingOptions(
            host=host,
            port=port,
            timeout_s=timeout,
            max_request_bytes=max_request_mib << 20,
            batching=batching,
            metrics_port=metrics_port,
            nats_url=nats_url,
            replica_index=replica_index,
            replica_size=replica_size,
        ),
    )
