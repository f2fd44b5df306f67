"""`persia-launcher slurm`: writes the batch script of a job for SLURM.

A heterogeneous job: each role is a component with resources of its own, and one `srun` starts its processes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from persia.errors import InvalidArgumentError
from persia.launcher.job_description import ROLES, JobDescription, description_options
from persia.launcher.options import COUNT, option
from persia.launcher.process_specs import OF_ONE_PROCESS, ProcessSpecs
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER

# Words that need no quotes, and that become variables of the script. A task knows its own number; the batch
# script knows the address of the ranks.
_TASK, _ADDRESS, _PORT = "%SLURM_TASK%", "%MASTER_ADDR%", "%MASTER_PORT%"
_VARIABLES = {_TASK: "$SLURM_PROCID", _ADDRESS: "$MASTER_ADDR", _PORT: "$MASTER_PORT"}

_STANDBYS = "standbys"
# Of each parameter server and standby: more are a server that cannot run.
_RESTARTS = 20

_START = """\
set -e
{setup}
set -uo pipefail
# Variables of one process, which sbatch would hand to all of them.
unset {of_one_process}
export PERSIA_JOB_NAME={job_name} PYTHONUNBUFFERED=1
export PERSIA_EMBEDDING_CONFIG={embedding_config}
# This script runs on the first node of component 0, and so does the broker. Ports differ from job to job.
export PERSIA_BIND_HOST=0.0.0.0
export PERSIA_NATS_PORT=$((10000 + SLURM_JOB_ID % 10000))
export PERSIA_NATS_URL="nats://$(hostname):$PERSIA_NATS_PORT"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{ranks}" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

own_secret=
stop() {{
    trap '' TERM
    [[ -z "$(jobs -pr)" ]] || kill $(jobs -pr) 2>/dev/null || true
    [[ -z "$own_secret" ]] || rm -f "$own_secret"
}}
trap stop EXIT
trap 'exit 143' TERM
# All nodes read the job's secret from this directory, which they share; only this user can read the file.
if [[ -z "${{PERSIA_JOB_SECRET:-}}${{PERSIA_JOB_SECRET_FILE:-}}" ]]; then
    own_secret="$PWD/.persia-secret-$SLURM_JOB_ID"
    export PERSIA_JOB_SECRET_FILE="$own_secret"
    persia-launcher secret create >/dev/null
fi

declare -A needed # the job fails when one of them ends before the training
persia-launcher nats-server --host 0.0.0.0 </dev/null &
needed[nats]=$!
"""

_END = """
fail() {{
    local count=$((${{SLURM_RESTART_COUNT:-0}} + 1))
    if ((count <= {max_restarts})); then
        echo "persia-launcher: asks SLURM to queue the job again (restart $count of {max_restarts})" >&2
        # Not a job that is being cancelled, whose processes end too. SLURM then ends this script.
        if scontrol requeue Incomplete "$SLURM_JOB_ID"; then sleep 600 & wait $!; fi
        echo "persia-launcher: SLURM has not queued the job again; submit it again with sbatch" >&2
    fi
    exit "$1"
}}
has_ended() {{ ! kill -0 "$1" 2>/dev/null; }}
until has_ended "$training"; do
    for name in "${{!needed[@]}}"; do
        if has_ended "${{needed[$name]}}"; then
            echo "persia-launcher: $name ended before the training; the job is stopped" >&2
            fail 1
        fi
    done
    # Loaders may end before the training. If they fail, the training may still be about to end.
    if [[ -n "$loaders" ]] && has_ended "$loaders" && ! wait "$loaders"; then
        sleep 5
        has_ended "$training" && break
        echo "persia-launcher: data-loaders failed; the job is stopped" >&2
        fail 1
    fi
    sleep 1
done
wait "$training" || fail $?
"""


@dataclass(frozen=True, kw_only=True)
class SlurmJob(JobDescription):
    """What `persia-launcher slurm` was asked for."""

    nodes: int
    sbatch: tuple[str, ...]
    sbatch_for: tuple[tuple[str, tuple[str, ...]], ...]
    setup: str
    max_restarts: int


@click.command("slurm")
@description_options
@option("--nodes", type=COUNT, default=1, help="Machines of ranks, each with --nproc-per-node of them.")
@option(
    "--sbatch",
    default="",
    metavar="TEXT",
    callback=lambda _ctx, _param, text: tuple(shlex.split(text)),
    help="Options of sbatch for every component: '--partition=cpu --time=12:00:00'.",
)
@option(
    "--sbatch-for",
    multiple=True,
    type=(click.Choice(ROLES), str),
    metavar="ROLE TEXT",
    callback=lambda _ctx, _param, given: tuple((role, tuple(shlex.split(text))) for role, text in given),
    help="Options of sbatch for one role: parameter-servers '--cpus-per-task=16 --mem-per-cpu=8G', or ranks "
    "'--gpus-per-node=8'.",
)
@option(
    "--setup", default="", metavar="TEXT", help="A line of bash to run first: 'source venv/bin/activate'."
)
@option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    help="A job that fails is queued again, so often at most. A failure of a node counts, but always queues "
    "it again. A script with TrainCtx(recovery=...) continues after its newest checkpoint.",
)
@option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to this file; default: standard output.",
)
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def command(output: Path | None, **given: Any) -> None:
    """Write the batch script that runs a whole job under SLURM: sbatch FILE.

    \b
    The script is a heterogeneous job with a component for each role: parameter servers, embedding workers,
    data loaders, and ranks. The broker runs on the first node. All nodes share the working directory. The
    job ends with the exit code of the training script, or when another process fails. With
    `standbys: 1` in --global-config, standbys are one more component, with the sbatch options of parameter
    servers. A parameter server or standby that fails is then started again, up to 20 times.
    """
    job = SlurmJob(**given)
    job.check()
    script = sbatch_script(job)
    if output is None:
        click.echo(script, nl=False)
    else:
        output.write_text(script, encoding="utf-8")


def sbatch_script(job: SlurmJob) -> str:
    """The batch script. Raises InvalidArgumentError for an sbatch option that is a line of its own."""
    embedding_config = str(Path(job.embedding_config).resolve())
    # Tasks inherit the environment of the batch script: the specs add nothing to it.
    specs = ProcessSpecs(
        env={},
        embedding_config=embedding_config,
        global_config=job.global_config and str(Path(job.global_config).resolve()),
        launcher=("persia-launcher",),
    )
    counts = {"parameter-servers": job.parameter_servers, "embedding-workers": job.embedding_workers}
    commands = [
        specs.server(EMBEDDING_PARAMETER_SERVER, _TASK, job.parameter_servers),
        specs.server(EMBEDDING_WORKER, _TASK, job.embedding_workers),
    ]
    if job.has_standbys:
        counts[_STANDBYS] = job.parameter_servers
        commands.append(specs.server(EMBEDDING_PARAMETER_SERVER, _TASK, job.parameter_servers, standby=True))
    is_paired = {"parameter-servers", _STANDBYS} if job.has_standbys else set()
    if job.data_loader is not None:
        counts["data-loaders"] = job.data_loaders
        commands.append(specs.data_loader(job.data_loader, job.loader_args, _TASK, job.data_loaders, {}))
    several = (f"--node-rank={_TASK}", f"--master-addr={_ADDRESS}", f"--master-port={_PORT}")
    machines = (f"--nnodes={job.nodes}", *several) if job.nodes > 1 else ()
    commands.append(specs.nn_worker(job.nn_worker, job.script_args, job.nproc_per_node, {}, machines))
    counts["ranks"] = job.nodes
    start = _START.format(
        setup=job.setup,
        of_one_process=" ".join(OF_ONE_PROCESS),
        job_name=shlex.quote(job.job_name),
        embedding_config=shlex.quote(embedding_config),
        ranks=list(counts).index("ranks"),
    )
    steps = [
        _step(group, role, spec.command, spec.env, is_restarted=role in is_paired)
        for group, (role, spec) in enumerate(zip(counts, commands, strict=True))
    ]
    if job.data_loader is None:
        steps.insert(-1, "loaders=\n")
    return _header(job, counts) + start + "".join(steps) + _END.format(max_restarts=job.max_restarts)


def _header(job: SlurmJob, counts: Mapping[str, int]) -> str:
    lines = [
        "#!/bin/bash",
        "# Written by `persia-launcher slurm`.",
        f"#SBATCH --job-name={shlex.quote(job.job_name)}",
    ]
    for role, count in counts.items():
        if role != "parameter-servers":
            lines.append("#SBATCH hetjob")
        lines.append(f"#SBATCH --ntasks={count}")
        if job.max_restarts:
            lines.append("#SBATCH --requeue --open-mode=append")
        if role == "ranks":
            lines.append(f"#SBATCH --nodes={count} --ntasks-per-node=1")
        # sbatch hands the options of one component to no other.
        described = "parameter-servers" if role == _STANDBYS else role
        own = [word for name, words in job.sbatch_for if name == described for word in words]
        for word in (*job.sbatch, *own):
            if "\n" in word or not word.startswith("-"):
                raise InvalidArgumentError(
                    f"sbatch option {word!r} of {role}: write each option as one word, --NAME=VALUE"
                )
            lines.append(f"#SBATCH {shlex.quote(word)}")
    return "\n".join(lines) + "\n\n"


def _step(
    group: int, role: str, command: Sequence[str], env: Mapping[str, str], *, is_restarted: bool
) -> str:
    """Starts the processes of a component in the background, and keeps the process ID of their `srun`."""
    words = f"exec {shlex.join(command)}"
    if is_restarted:
        # One that was killed becomes the standby of the process that has replaced it.
        words = f"for i in {{0..{_RESTARTS}}}; do {shlex.join(command)} && exit; sleep 1; done; exit 1"
    for word, variable in _VARIABLES.items():
        words = words.replace(word, variable)
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in env.items())
    keep = {"ranks": "training", "data-loaders": "loaders"}.get(role, f"needed[{role}]")
    step = f"srun --het-group={group} --kill-on-bad-exit=1 --label --input=none"
    return f"\n{variables}{step} \\\n    bash -c {shlex.quote(words)} &\n{keep}=$!\n"
