"""`persia-launcher nn-worker`: the training script, one process or one for each rank."""

from __future__ import annotations

from pathlib import Path

import click

from persia import env
from persia.launcher.options import COUNT, option, sign_key, verify_key
from persia.launcher.script import PASS_THROUGH, become, script_and_arguments


@click.command("nn-worker", context_settings=PASS_THROUGH)
@option(
    "--nproc-per-node",
    type=COUNT,
    default=1,
    help="Ranks on this machine, usually one for each GPU.",
)
@option(
    "--node-rank",
    type=click.IntRange(min=0),
    default=0,
    help="Number of this machine, from 0.",
)
@option("--nnodes", type=COUNT, default=1, help="Number of machines.")
@option("--master-addr", help="Address of machine 0, when there are several.")
@option(
    "--master-port",
    type=click.IntRange(1, 65535),
    default=23456,
    help="Port on machine 0 where the ranks meet, when there are several machines.",
)
@sign_key
@verify_key
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FILEPATH] [SCRIPT_ARGS]...")
def command(
    nproc_per_node: int,
    node_rank: int,
    nnodes: int,
    master_addr: str | None,
    master_port: int,
    words: tuple[str, ...],
) -> None:
    """Run the training script FILEPATH (or PERSIA_NN_WORKER_ENTRY) with SCRIPT_ARGS.

    One rank runs in this process. More run under torchrun: when one fails, all end, with its error.

    \b
    Two machines with eight GPUs each:
      persia-launcher nn-worker --nnodes 2 --node-rank 0 --master-addr HOST0 --nproc-per-node 8 train.py
      persia-launcher nn-worker --nnodes 2 --node-rank 1 --master-addr HOST0 --nproc-per-node 8 train.py
    """
    script, arguments = script_and_arguments(words, env.nn_worker_entry(), "PERSIA_NN_WORKER_ENTRY")
    env.require_nats_url()  # the script would say so too, but late and with a traceback
    if node_rank >= nnodes:
        raise click.BadParameter(f"{node_rank} is not below --nnodes {nnodes}", param_hint="--node-rank")
    # Without torchrun the script starts seconds earlier, and a debugger sees it.
    if nproc_per_node == nnodes == 1:
        become([script, *arguments], {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    if nnodes > 1 and master_addr is None:
        raise click.UsageError("with several machines --master-addr must name machine 0")
    rendezvous = torchrun_arguments(nproc_per_node, nnodes, node_rank, master_addr, master_port)
    # rank.py stands between torchrun and the script, so that ranks end when torchrun is killed.
    become([*rendezvous, str(Path(__file__).with_name("rank.py")), script, *arguments], {})


def torchrun_arguments(
    nproc_per_node: int, nnodes: int, node_rank: int, master_addr: str | None, master_port: int
) -> list[str]:
    """Python's arguments before the script. One machine needs no address: torchrun takes a free port."""
    arguments = ["-m", "persia.launcher.torchrun", f"--nproc-per-node={nproc_per_node}"]
    if nnodes == 1:
        return [*arguments, "--standalone"]
    return [
        *arguments,
        f"--nnodes={nnodes}",
        f"--node-rank={node_rank}",
        f"--master-addr={master_addr}",
        f"--master-port={master_port}",
    ]
