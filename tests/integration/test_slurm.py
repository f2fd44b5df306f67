"""`persia-launcher slurm` under SLURM itself: a controller and a node on this machine.

Needs Debian's packages slurmctld, slurmd and slurm-client, and root: SLURM's node starts processes of users.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from persia.launcher.supervisor import ProcessSpec, Supervisor
from persia.utils import dump_yaml
from persia.waiting import Attempts
from tests.integration.conftest import EMBEDDING_CONFIG
from tests.ports import free_port

JOBS = Path(__file__).with_name("jobs")
DEADLINE_S = 240.0
_SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
KillWait=20
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _program(name: str) -> Path:
    found = shutil.which(name) or shutil.which(f"{name}-wlm")  # Debian links the first to the second
    if found is None:
        pytest.skip(f"needs SLURM, and there is no {name}: apt-get install slurmctld slurmd slurm-client")
    return Path(found)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Runs `slurm(command, ...)` beside a SLURM of one node, and returns what the command printed."""
    programs = {name: _program(name) for name in ("slurmctld", "slurmd", "slurmstepd", "sbatch", "srun")}
    if os.geteuid():
        pytest.skip("SLURM's node needs root")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (plugins,) = (programs["slurmctld"].parents[1] / "lib").glob("*/slurm-wlm")
    ports = {"controller_port": free_port(), "node_port": free_port()}
    conf = folder / "slurm.conf"
    conf.write_text(_SLURM_CONF.format(folder=folder, host=socket.gethostname(), plugins=plugins, **ports))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": path}

    def run(*command: str, cwd: Path = folder) -> str:
        done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    with Supervisor() as supervisor:
        controller = (str(programs["slurmctld"]), "-D", "-c")
        supervisor.start(ProcessSpec(name="slurmctld", command=controller, env=env))
        node = (str(programs["slurmd"]), "-D", "-c", "-d", str(programs["slurmstepd"]))
        supervisor.start(ProcessSpec(name="slurmd", command=node, env=env))
        for _ in Attempts(DEADLINE_S, pause_s=0.2):
            done = subprocess.run(["sinfo", "-h", "-o", "%t"], env=env, capture_output=True, text=True)
            if done.stdout.strip() == "idle":
                break
        else:
            pytest.fail("\n".join(process.output for process in supervisor.processes))
        yield run


def _write(slurm, folder: Path, script: str, *arguments: str) -> None:
    dump_yaml(EMBEDDING_CONFIG, str(folder / "slots.yml"))
    slurm(
        *(sys.executable, "-m", "persia.launcher", "slurm", "--embedding-config", "slots.yml"),
        *("--nn-worker", script, "--output", "job.sh", *arguments),
        cwd=folder,
    )


def test_slurm_accepts_the_script(slurm, tmp_path):
    options = ("--parameter-servers", "4", "--sbatch", "--partition=all --time=10")
    _write(slurm, tmp_path, str(JOBS / "train.py"), *options, "--sbatch-for", "ranks", "--cpus-per-task=2")
    assert "to start at" in slurm("sbatch", "--test-only", "job.sh", cwd=tmp_path)
