"""`persia-k8s-utils`, with the published subcommands."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from persia_k8s.errors import PersiaK8sError
from persia_k8s.names import MASTER_SECRET


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PersiaK8sError as error:
            # One line: the errors of this package say what to do, a traceback does not.
            click.secho(f"persia-k8s-utils: {error}", fg="red", err=True)
            sys.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def cli() -> None:
    """Run persia on Kubernetes."""


@cli.command()
@click.option(
    "--output", default="./jobs.persia.com.yaml", type=click.Path(path_type=Path), help="File to write."
)
def gencrd(output: Path) -> None:
    """Write the CustomResourceDefinition of PersiaJob."""
    # Imported where it is used, here and below: `gencrd` and --help need no Kubernetes client.
    from persia_k8s.crd import crd_yaml

    try:
        output.write_text(crd_yaml(), encoding="utf-8")
    except OSError as error:
        raise PersiaK8sError(f"--output {output} cannot be written: {error.strerror}") from error


@cli.command()
@click.option("--namespace", multiple=True, help="Namespace to watch; may be repeated. Default: all.")
@click.option(
    "--liveness-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on which /healthz answers while the operator runs; 0: none.",
)
@click.option(
    "--cpu-image",
    envvar="PERSIA_CPU_IMAGE",
    show_envvar=True,
    default="persiaml/persia-cpu-runtime:latest",
    help="Image of roles that name none.",
)
@click.option(
    "--cuda-image",
    envvar="PERSIA_CUDA_IMAGE",
    show_envvar=True,
    default="persiaml/persia-cuda-runtime:latest",
    help="Image of roles that name none and ask for GPUs.",
)
@click.option(
    "--lease",
    metavar="NAMESPACE/NAME",
    help="Lease that one of several operators holds; the others wait. Without it, run one operator only.",
)
@click.option(
    "--master-secret",
    metavar="NAMESPACE/NAME",
    default="/".join(MASTER_SECRET),
    help="Secret from which the CAs of jobs with `security.tls` are derived; made at the first such job.",
)
def operator(
    namespace: tuple[str, ...],
    liveness_port: int,
    cpu_image: str,
    cuda_image: str,
    lease: str | None,
    master_secret: str,
) -> None:
    """Run PersiaJobs, until SIGTERM or Ctrl-C."""
    from persia_k8s.builders.manifest import Images
    from persia_k8s.operator import run_operator

    images = Images(cpu=cpu_image, cuda=cuda_image)
    place = None if lease is None else _place("--lease", lease)
    run_operator(namespace, liveness_port, images, place, _place("--master-secret", master_secret))


def _place(option: str, text: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not namespace or not name:
        raise click.UsageError(f"{option} {text}: write NAMESPACE/NAME")
    return namespace, name


@cli.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="Port; 0 takes a free one.")
@click.option("--host", default="0.0.0.0", help="Address to listen on.")
@click.option(
    "--token-file",
    envvar="PERSIA_K8S_TOKEN_FILE",
    show_envvar=True,
    required=True,
    type=click.Path(path_type=Path),
    help="File with the token that callers must send (Authorization: Bearer TOKEN).",
)
@click.option(
    "--read-token-file",
    type=click.Path(path_type=Path),
    help="File with a token for callers that may only read.",
)
@click.option(
    "--tls-dir",
    type=click.Path(path_type=Path),
    help="Folder with tls.crt and tls.key, as a mounted Secret has them: serve HTTPS. Changes are picked up.",
)
@click.option(
    "--max-requests", type=click.IntRange(min=1), default=32, help="Requests at once; more get status 429."
)
@click.option(
    "--max-rate",
    type=click.FloatRange(min=1),
    default=50.0,
    help="Requests a second, on average; more get status 429.",
)
def server(
    port: int,
    host: str,
    token_file: Path,
    read_token_file: Path | None,
    tls_dir: Path | None,
    max_requests: int,
    max_rate: float,
) -> None:
    """Run the REST service: apply, delete, list, status and logs of jobs."""
    from persia_k8s.access import Limits
    from persia_k8s.server import run_server

    limits = Limits(concurrent=max_requests, per_second=max_rate)
    run_server(host, port, token_file, read_token_file=read_token_file, tls_folder=tls_dir, limits=limits)


if __name__ == "__main__":
    cli()
