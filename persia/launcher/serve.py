"""`persia-launcher serve`: predictions of checkpoints over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from persia.launcher import options
from persia.launcher.heap import keep_heap
from persia.launcher.options import COUNT, PORT, option

if TYPE_CHECKING:
    from persia.packets.follower import FollowOptions
    from persia.serving.embeddings import EmbeddedRows, RemoteRows
    from persia.serving.server import ModelOptions
    from persia.storage.location import Location

_T = TypeVar("_T")
_DEFAULT_AFTER_S = 1.0  # a lookup without an answer is answered from default rows
_FILE = click.Path(dir_okay=False, path_type=Path)
# What may differ between the models of a server, by the names of the options.
_OF_MODEL = [
    "embedding-config",
    "incremental-dir",
    "sample",
    "gate",
    "gate-drift",
    "gate-auc",
    "canary",
    "canary-share",
    "shadow-share",
    "canary-max-drift",
    "request-log",
    "threads",
    "max-batch-size",
    "max-delay-ms",
    "max-queued",
]
# Of these, what is of one model alone, by their parameters.
_OF_ONE = {
    "incremental_dir": "incremental-dir=DIR to one of them and rows=NAME to the others",
    "canary": "each its own canary=DIR",
    "request_log": "each its own request-log=FILE",
}
_SHARE, _DRIFT = click.FloatRange(0, 1), click.FloatRange(min=0.0)


def _share_or_file(ctx: click.Context, param: click.Parameter, text: str) -> float | Path:
    if (path := Path(text)).is_file():
        return path
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise click.BadParameter(f"{text!r} is neither a number from 0 to 1 nor a file with one", ctx, param)
    return share


def _bytes_of_mib(_ctx: click.Context, _param: click.Parameter, mib: int) -> int:
    return mib << 20


_canary_options = options.all_of(
    option("--canary", metavar="DIR|URL", help="Serve this checkpoint, or directory of them, as a canary."),
    option(
        "--canary-share",
        "share",
        metavar="SHARE|FILE",
        default="0",
        callback=_share_or_file,
        help="Share of requests that it answers, or a file with it, which may change while the server runs.",
    ),
    option(
        "--shadow-share",
        metavar="SHARE|FILE",
        default="0",
        callback=_share_or_file,
        help="Share of answered requests that it computes as well, for a comparison; or a file with it.",
    ),
    option(
        "--canary-max-errors",
        "max_errors",
        type=click.IntRange(min=0),
        default=5,
        help="It is rolled back when it fails more of its last 100 requests.",
    ),
    option(
        "--canary-max-drift",
        "drift_limit",
        type=_DRIFT,
        help="It is rolled back when its last 100 shadow requests differ by more, as with --gate-drift.",
    ),
)
_log_options = options.all_of(
    option("--request-log", type=_FILE, help="Append answered requests, as --gate and --sample read them."),
    option("--request-log-share", "log_share", type=_SHARE, default=1.0, help="Share of them."),
    option(
        "--request-log-mib",
        "max_log_bytes",
        type=COUNT,
        default=64,
        callback=_bytes_of_mib,
        help="Largest size of the file, which then becomes FILE.1.",
    ),
)


# Parameters are named like the fields of the dataclasses that `_made` makes.
@click.command("serve")
@click.argument("checkpoint", required=False)
@option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=DIR[,OPTION=VALUE]...",
    help="Serve several models, instead of CHECKPOINT and --model-name. Options behind a comma are for this "
    "model alone, others for all: rows=NAME (of a model before it, whose rows it reads), "
    f"{', '.join(_OF_MODEL)}.",
)
@options.model_name
@options.embedding_config(
    "Slots of the job that wrote the checkpoint (YAML). Needed to load rows into this process."
)
@options.embedding_workers
@options.verify_key
@options.trust_scripts
@options.host
@option("--port", type=PORT, default=8001, help="0 takes a free one.")
@option(
    "--http-port",
    type=PORT,
    help="The same protocol over HTTP, JSON or binary; 0 takes a free one; default: none.",
)
@option(
    "--max-batch-size",
    type=click.IntRange(1, 65535),
    default=1024,
    help="Samples computed at once; requests that wait together are computed together.",
)
@option(
    "--max-delay-ms",
    "max_delay_s",
    type=click.FloatRange(0, 1000),
    default=0.0,
    callback=lambda _ctx, _param, milliseconds: milliseconds / 1000,
    help="How long a request may wait for others to be computed with.",
)
@option(
    "--max-queued",
    type=COUNT,
    default=512,
    help="Requests that may wait; more are refused with RESOURCE_EXHAUSTED.",
)
@option(
    "--max-request-mib",
    "max_request_bytes",
    type=click.IntRange(1, 1024),
    default=16,
    callback=_bytes_of_mib,
    help="Of one request.",
)
@option("--threads", "num_threads", type=click.IntRange(1, 64), default=1, help="Batches computed at a time.")
@option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.001),
    default=10.0,
    help="Seconds for a request; its own deadline counts where it is earlier.",
)
@option(
    "--poll",
    "poll_s",
    type=click.FloatRange(min=0.05),
    default=1.0,
    help="Seconds between two looks for a new version.",
)
@option(
    "--sample",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with PersiaBatch.to_bytes(), one or more: each version answers them before it is used, and "
    "is warm then. A version that cannot is not used.",
)
@option(
    "--gate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with PersiaBatch.to_bytes() of samples, one after the other: a version is used only if it "
    "predicts on them what --gate-drift and --gate-auc say, or if its packets continue those in use.",
)
@option(
    "--gate-drift",
    "max_drift",
    type=_DRIFT,
    help="Largest mean absolute difference of predictions from those of the version in use.",
)
@option("--gate-auc", "min_auc", type=_SHARE, help="Lowest AUC on the samples' labels.")
@option(
    "--incremental-dir",
    metavar="DIR|URL",
    help="Follow the packets that a training writes there (enable_incremental_update).",
)
@option(
    "--incremental-poll",
    type=click.FloatRange(min=0.01),
    default=0.25,
    help="Seconds between two looks for a new packet.",
)
@option(
    "--max-packets-behind",
    "max_behind",
    type=COUNT,
    default=1000,
    help="Load a checkpoint instead of applying more packets than these.",
)
@option(
    "--server-status",
    "servers",
    multiple=True,
    metavar="HOST:PORT",
    help="Metrics port of a parameter server behind the embedding workers, once for each: a packet's dense "
    "model answers only when all of them have its rows.",
)
@option(
    "--on-missing-server",
    type=click.Choice(["fail", "default"]),
    default="fail",
    help="Requests while a server of remote rows is down: they fail, or are answered from default rows "
    "(zeros), and marked. `default` needs --embedding-config.",
)
@_canary_options
@_log_options
@option(
    "--allow-nonfinite",
    is_flag=True,
    help="Answer requests with NaN or Inf in dense features, which are refused otherwise.",
)
@option(
    "--require-token",
    is_flag=True,
    variable="PERSIA_REQUIRE_TOKEN",
    help="Answer only who sends the token of `persia-launcher secret token --for serve`.",
)
@option(
    "--tls-cert",
    type=_FILE,
    help="Certificate of the server (PEM), in place of that of PERSIA_TLS_DIR.",
)
@option("--tls-key", type=_FILE, help="Its private key.")
@option("--tls-client-ca", type=_FILE, help="Answer only clients with a certificate of this CA.")
@options.metrics_port
@option(
    "--nats-url",
    variable="PERSIA_NATS_URL",
    metavar="URL",
    help="Broker of the job (PERSIA_JOB_NAME) to be shown in by persia-launcher status. Not needed to serve.",
)
@options.replica_options
@option("--device-id", type=click.IntRange(min=0), help="CUDA device of the model; default: the CPU.")
def command(checkpoint: str | None, models: tuple[str, ...], **given: Any) -> None:
    """Answer requests with the predictions of CHECKPOINT, over gRPC (Open Inference Protocol, KServe v2).

    \b
    CHECKPOINT is a directory or URL that dump_checkpoint(..., with_jit_model=True) wrote. Of a directory of
    checkpoints the one that `latest` names is served, and the next one when it changes, without a pause.
      persia-launcher serve model/ --embedding-config embedding_config.yml
      persia-launcher serve model/ --embedding-worker host1:8887 --embedding-worker host2:8887
    With --incremental-dir it starts from a checkpoint and follows a running training, seconds behind. A file
    `pin` beside the packets, written like their `latest`, holds it at one, or brings it back there:
      persia-launcher serve model/ --embedding-config embedding_config.yml --incremental-dir packets/
    Several models in one server; those with the same rows share one copy:
      persia-launcher serve --model ads=ads/ --model feed=feed/ --embedding-config embedding_config.yml
    """
    # Imported here: torch takes seconds, and --help is to be instant.
    from persia.serving.server import ServingOptions, serve

    if (checkpoint is None) == (not models):
        raise click.UsageError("give either CHECKPOINT or, once for each of several models, --model NAME=DIR")
    each = [_given_to_model(text, given) for text in models] or [{**given, "checkpoint": checkpoint}]
    _check_models(each)
    keep_heap()  # a batch needs what the one before has freed
    serve([_model_options(**one) for one in each], _made(ServingOptions, given))


def _given_to_model(text: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options for a model of --model: its own in place of those for all."""
    ctx = click.get_current_context()
    (name, _, checkpoint), *own = (part.partition("=") for part in text.split(","))
    if not (name and checkpoint):
        raise click.UsageError(f"--model {text!r} is not like NAME=DIR: name the model and its checkpoint")
    if ctx.get_parameter_source("model_name") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--model-name is of one model: with --model, names are before the =")
    found = {**given, "model_name": name, "checkpoint": checkpoint}
    seen: set[str] = set()
    by_name = {word: param for param in ctx.command.params for word in param.opts}
    for word, sign, value in own:
        if word in seen:
            raise click.UsageError(f"--model {name}: {word} is given twice")
        seen.add(word)
        if (word == "rows" or word in _OF_MODEL) and not sign:
            raise click.UsageError(f"--model {name}: {word!r} has no value: give {word}=VALUE")
        if word == "rows":
            found["rows_of"] = value
        elif word in _OF_MODEL:
            param = by_name[f"--{word}"]
            found[str(param.name)] = param.process_value(ctx, value)
        else:
            raise click.UsageError(
                f"--model {name}: {word!r} is no option of one model: choose among rows, "
                f"{', '.join(_OF_MODEL)}"
            )
    return found


def _check_models(each: Sequence[dict[str, Any]]) -> None:
    """Before the first one is loaded."""
    from persia.storage.location import Location

    names: list[str] = []
    for one in each:
        name, rows_of = one["model_name"], one.get("rows_of")
        if name in names:
            raise click.UsageError(f"--model {name} is given twice: name each model differently")
        if rows_of is not None and rows_of not in names:
            raise click.UsageError(
                f"--model {name}: rows={rows_of} names no model before it: give that one first"
            )
        if rows_of is not None and one["incremental_dir"] is not None:
            # Their dense models would replace its own.
            raise click.UsageError(
                f"--model {name}: rows={rows_of} has no packets of its own: give incremental-dir=DIR to "
                f"{rows_of} alone, behind a comma"
            )
        if rows_of is not None and one["embedding_workers"]:
            raise click.UsageError(
                f"--model {name}: with --embedding-worker all models read the rows of the workers: leave "
                "rows= out"
            )
        if one["canary"] is None and (one["share"] or one["shadow_share"] or one["drift_limit"] is not None):
            raise click.UsageError("--canary-share, --shadow-share and --canary-max-drift need --canary")
        names.append(name)
    for param, remedy in _OF_ONE.items():
        places = [Location.of(one[param]) for one in each if one[param] is not None]
        if len(set(places)) < len(places):
            option = param.replace("_", "-")
            raise click.UsageError(
                f"--{option} is the same for several models: give {remedy}, behind a comma"
            )


def _model_options(
    *,
    checkpoint: str,
    model_name: str,
    embedding_config: str | None,
    embedding_workers: tuple[str, ...],
    sample: Path | None,
    gate: Path | None,
    max_drift: float | None,
    min_auc: float | None,
    on_missing_server: str,
    device_id: int | None,
    canary: str | None,
    request_log: Path | None,
    rows_of: str | None = None,
    **given: Any,
) -> ModelOptions:
    import torch

    from persia.config import load_embedding_config
    from persia.serving.batcher import BatchingOptions
    from persia.serving.canary import CanaryOptions
    from persia.serving.embeddings import RemoteRows
    from persia.serving.gate import Gate
    from persia.serving.predictor import ModelSettings
    from persia.serving.request_log import RequestLogOptions
    from persia.serving.server import ModelOptions
    from persia.storage.location import Location

    if gate is None and (max_drift is not None or min_auc is not None):
        raise click.UsageError("--gate-drift and --gate-auc need --gate: name a file with samples")
    # Rows come from workers, or from the checkpoint if there are slots; other models need neither.
    location, slots, rows, defaults = Location.of(checkpoint), None, None, None
    if on_missing_server == "default":
        rows, defaults = _rows_or_defaults(embedding_workers, embedding_config, given["timeout_s"])
    elif embedding_workers:
        rows = RemoteRows(embedding_workers, deadline_s=given["timeout_s"])
    elif embedding_config is not None:
        slots = load_embedding_config(embedding_config)
    settings = _made(
        ModelSettings,
        given,
        name=model_name,
        location=location,
        slots=slots,
        embeddings=rows,
        default_rows=defaults,
        device=None if device_id is None else torch.device("cuda", device_id),
        sample=None if sample is None else sample.read_bytes(),
        gate=None if gate is None else Gate.of_file(gate, max_drift=max_drift, min_auc=min_auc),
        follow=_follow_options(location, **given),
    )
    return ModelOptions(
        settings=settings,
        rows_of=rows_of,
        batching=_made(BatchingOptions, given),
        canary=None if canary is None else _made(CanaryOptions, given, location=Location.of(canary)),
        request_log=None if request_log is None else _made(RequestLogOptions, given, path=request_log),
    )


def _follow_options(
    checkpoints: Location, *, incremental_dir: str | None, incremental_poll: float, **given: Any
) -> FollowOptions | None:
    from persia.packets.follower import FollowOptions
    from persia.storage.location import Location

    if incremental_dir is None:
        return None
    packets = Location.of(incremental_dir)
    return _made(FollowOptions, given, packets=packets, checkpoints=checkpoints, poll_s=incremental_poll)


def _rows_or_defaults(
    embedding_workers: Sequence[str], embedding_config: str | None, timeout_s: float
) -> tuple[RemoteRows, EmbeddedRows]:
    """Remote rows, and those that answer while servers are down."""
    from persia.config import load_embedding_config
    from persia.serving.embeddings import EmbeddedRows, RemoteRows

    if not embedding_workers or embedding_config is None:
        raise click.UsageError(
            "--on-missing-server default replaces rows of servers: give --embedding-worker, and "
            "--embedding-config for the shapes of default rows"
        )
    # A request must have time left for its answer when its lookup fails.
    rows = RemoteRows(embedding_workers, deadline_s=min(_DEFAULT_AFTER_S, timeout_s / 2))
    return rows, EmbeddedRows(None, load_embedding_config(embedding_config))


def _made(kind: type[_T], given: dict[str, Any], **others: Any) -> _T:
    """A dataclass of the options that are named like its fields, and of `others`, which win."""
    # An option whose name no dataclass has would be lost here: test_command_line.py sets all of them.
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{**{name: value for name, value in given.items() if name in names}, **others})
