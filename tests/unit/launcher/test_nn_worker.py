"""How torchrun is called."""

from persia.launcher.nn_worker import torchrun_arguments


def test_one_machine_takes_a_free_port():
    assert torchrun_arguments(4, 1, 0, None, 23456) == [
        "-m",
        "persia.launcher.torchrun",
        "--nproc-per-node=4",
        "--standalone",
    ]


def test_several_machines_meet_at_the_first():
    assert torchrun_arguments(4, 2, 1, "host0", 23456)[3:] == [
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=host0",
        "--master-port=23456",
    ]
