"""`persia-launcher slurm` under SLURM itself: a controller and five nodes on this machine.

Needs Debian's packages slurmctld, slurmd and slurm-client, and root: SLURM's nodes start processes of users.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.chaos.job import trained_by
from persia.launcher.supervisor import ProcessSpec, Supervisor
from persia.utils import dump_yaml
from persia.waiting import Attempts
from tests.integration.conftest import EMBEDDING_CONFIG
from tests.ports import free_port

JOBS = Path(__file__).with_name("jobs")
DEADLINE_S = 240.0
NODES = [f"node{number}" for number in range(5)]  # components of a job do not share one
_SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
KillWait=20
MailProg=/bin/true
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _program(name: str) -> Path:
    found = shutil.which(name) or shutil.which(f"{name}-wlm")  # Debian links the first to the second
    if found is None:
        pytest.skip(f"needs SLURM, and there is no {name}: apt-get install slurmctld slurmd slurm-client")
    return Path(found)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Runs `slurm(command, ...)` beside a SLURM of five nodes, and returns what the command printed."""
    programs = {name: _program(name) for name in ("slurmctld", "slurmd", "slurmstepd", "sbatch", "srun")}
    if os.geteuid():
        pytest.skip("SLURM's node needs root")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (plugins,) = (programs["slurmctld"].parents[1] / "lib").glob("*/slurm-wlm")
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4" for node in NODES
    )
    conf = folder / "slurm.conf"
    settings = {"folder": folder, "host": host, "plugins": plugins, "nodes": nodes}
    conf.write_text(_SLURM_CONF.format(controller_port=free_port(), **settings))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": path}

    def run(*command: str, cwd: Path = folder) -> str:
        done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    with Supervisor() as supervisor:
        controller = (str(programs["slurmctld"]), "-D", "-c")
        supervisor.start(ProcessSpec(name="slurmctld", command=controller, env=env))
        for node in NODES:
            (folder / f"{node}.spool").mkdir()
            daemon = (str(programs["slurmd"]), "-D", "-c", "-N", node, "-d", str(programs["slurmstepd"]))
            supervisor.start(ProcessSpec(name=node, command=daemon, env=env))
        for _ in Attempts(DEADLINE_S, pause_s=0.2):
            done = subprocess.run(["sinfo", "-h", "-o", "%t %D"], env=env, capture_output=True, text=True)
            if done.stdout.strip() == f"idle {len(NODES)}":
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


def _run_to_end(slurm, folder: Path) -> tuple[str, str]:
    """("STATE CODE:SIGNAL", output) of the job. A job that is queued again need not wait its two minutes."""
    number = slurm("sbatch", "--parsable", "--output=output.txt", "job.sh", cwd=folder).strip()
    for _ in Attempts(DEADLINE_S, pause_s=0.5):
        shown = dict(
            word.partition("=")[::2]
            for word in slurm("scontrol", "show", "job", f"{number}+0", "--oneliner").split()
            if "=" in word
        )
        if shown["JobState"] not in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"):
            return f"{shown['JobState']} {shown['ExitCode']}", (folder / "output.txt").read_text()
        if shown["Restarts"] != "0":
            _start_now(slurm, number, folder)
    pytest.fail(f"job {number} has not ended after {DEADLINE_S:g} s: {shown}")


def _start_now(slurm, number: str, folder: Path) -> None:
    """Starts a job that waits to be started again, unless processes of its last start are still there."""
    components = slurm("scontrol", "show", "job", number, "--oneliner").splitlines()
    waits = all("JobState=PENDING Reason=BeginTime" in component for component in components)
    if waits and not _running_in(folder):
        for component in components:
            slurm("scontrol", "update", component.split()[0], "StartTime=now")


def _running_in(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # has ended
            if Path(os.readlink(path / "cwd")) == folder:
                found.append(int(path.name))
    return found


def test_slurm_accepts_the_script(slurm, tmp_path):
    options = ("--parameter-servers", "4", "--sbatch", "--partition=all --time=10")
    _write(slurm, tmp_path, str(JOBS / "train.py"), *options, "--sbatch-for", "ranks", "--cpus-per-task=2")
    assert "to start at" in slurm("sbatch", "--test-only", "job.sh", cwd=tmp_path)


def test_a_whole_job_trains(slurm, tmp_path):
    options = ("--parameter-servers", "2", "--data-loaders", "2", "--nproc-per-node", "2")
    loader = ("--data-loader", str(JOBS / "loader.py"), "--loader-args", "--batches 6")
    _write(slurm, tmp_path, str(JOBS / "train.py"), *options, *loader, "--", "--output", "report")
    ended, output = _run_to_end(slurm, tmp_path)
    assert ended == "COMPLETED 0:0", output
    reports = [json.loads((tmp_path / f"report.rank{rank}.json").read_text()) for rank in (0, 1)]
    assert sorted(reports[0]["batch_ids"] + reports[1]["batch_ids"]) == list(range(12))
    assert not list(tmp_path.glob(".persia-secret-*"))


def _servers(folder: Path) -> list[int]:
    """Process IDs of parameter servers of the job in `folder`, standbys not."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # has ended
            words = (path / "cmdline").read_bytes().split(b"\0")
            is_server = b"embedding-parameter-server" in words and b"--standby" not in words
            if is_server and Path(os.readlink(path / "cwd")) == folder:
                found.append(int(path.name))
    return found


def test_a_killed_server_with_a_standby_ends_nothing(slurm, tmp_path):
    dump_yaml({"embedding_parameter_server_config": {"standbys": 1}}, str(tmp_path / "global.yml"))
    loader = ("--data-loader", str(JOBS / "loader.py"), "--loader-args", "--batches 200")
    options = ("--global-config", "global.yml", *loader)
    _write(slurm, tmp_path, str(JOBS / "train.py"), *options, "--", "--output", "report", "--pace", "0.05")
    output, killed = tmp_path / "output.txt", threading.Event()

    def kill() -> None:
        for _ in Attempts(DEADLINE_S):
            text = output.read_text() if output.exists() else ""
            if "has every row and change" in text and "batch 20\n" in text:
                (server,) = _servers(tmp_path)
                os.kill(server, signal.SIGKILL)
                killed.set()
                return

    killer = threading.Thread(target=kill)
    killer.start()
    ended, printed = _run_to_end(slurm, tmp_path)
    killer.join()
    assert ended == "COMPLETED 0:0", printed
    assert killed.is_set()
    assert "its standby takes over" in printed
    report = json.loads((tmp_path / "report.rank0.json").read_text())
    assert report["batch_ids"] == list(range(200))


def test_the_exit_code_is_that_of_the_training(slurm, tmp_path):
    (tmp_path / "train.py").write_text("import sys; sys.exit('no such data')\n")
    _write(slurm, tmp_path, "train.py")
    ended, output = _run_to_end(slurm, tmp_path)
    assert ended == "FAILED 1:0", output
    assert "no such data" in output


def test_a_server_that_fails_ends_the_job(slurm, tmp_path):
    (tmp_path / "train.py").write_text("import time; time.sleep(1000)\n")
    _write(slurm, tmp_path, "train.py")
    script = tmp_path / "job.sh"
    script.write_text(script.read_text().replace("--replica-size=1 ", "--replica-size=1 --no-such-option "))
    ended, output = _run_to_end(slurm, tmp_path)
    assert ended == "FAILED 1:0", output
    assert "ended before the training; the job is stopped" in output


def test_a_job_that_fails_is_queued_again(slurm, tmp_path):
    (tmp_path / "train.py").write_text(
        "open('starts', 'a').write('x'); exit(len(open('starts').read()) < 2)\n"
    )
    _write(slurm, tmp_path, "train.py", "--max-restarts", "1")
    ended, output = _run_to_end(slurm, tmp_path)
    assert ended == "COMPLETED 0:0", output
    assert "persia-launcher: asks SLURM to queue the job again (restart 1 of 1)" in output
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_job_that_is_cancelled_is_not_queued_again(slurm, tmp_path):
    (tmp_path / "train.py").write_text("import time; open('started', 'w'); time.sleep(1000)\n")
    _write(slurm, tmp_path, "train.py", "--max-restarts", "1")
    script = tmp_path / "job.sh"
    # So that the script sees its processes end before SLURM ends the script.
    script.write_text(script.read_text().replace("trap 'exit 143' TERM", "trap '' TERM"))

    def cancel() -> None:
        for _ in Attempts(DEADLINE_S):
            if (tmp_path / "started").exists():
                slurm("scancel", "--name=default")
                return

    canceller = threading.Thread(target=cancel)
    canceller.start()
    ended, output = _run_to_end(slurm, tmp_path)
    canceller.join()
    assert ended.startswith("CANCELLED"), output
    assert "asks SLURM to queue the job again" in output


def _kill_node_of_rank(folder: Path) -> str:
    """Kills the daemon of a node, its `slurmstepd` and the rank there; returns the node's name."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # has ended
            words = (path / "cmdline").read_bytes().split(b"\0")
            if str(JOBS / "recovered.py").encode() not in words or Path(os.readlink(path / "cwd")) != folder:
                continue
            variables = dict(
                word.partition(b"=")[::2] for word in (path / "environ").read_bytes().split(b"\0")
            )
            node = variables[b"SLURMD_NODENAME"].decode()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            (daemon,) = _processes(b"slurmd", b"-N", node.encode())
            for process in (daemon, parent, int(path.name)):
                os.kill(process, signal.SIGKILL)
            return node
    raise AssertionError("no rank runs")


def _processes(program: bytes, *arguments: bytes) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(program) and all(word in words for word in arguments):
                found.append(int(path.name))
    return found


def test_a_job_that_loses_a_node_is_queued_again_and_continues_after_its_checkpoint(slurm, tmp_path):
    """The last test: the node stays down."""
    loader = ("--data-loader", str(JOBS / "loader.py"), "--loader-args", "--total 200 --resume")
    script = ("--", str(tmp_path / "run"), "20", "0.05", "200")
    (tmp_path / "run").mkdir()
    _write(slurm, tmp_path, str(JOBS / "recovered.py"), *loader, "--max-restarts", "2", *script)
    output, nodes = tmp_path / "output.txt", list[str]()

    def kill() -> None:
        for _ in Attempts(DEADLINE_S):
            if output.exists() and "step 50\n" in output.read_text():
                nodes.append(_kill_node_of_rank(tmp_path))
                # SLURM would notice it by pings, after more than a minute.
                slurm("scontrol", "update", f"NodeName={nodes[0]}", "State=DOWN", "Reason=killed")
                return

    killer = threading.Thread(target=kill)
    killer.start()
    ended, printed = _run_to_end(slurm, tmp_path)
    killer.join()
    assert nodes
    assert ended == "COMPLETED 0:0", printed
    assert "continues after step" in printed
    trained, wasted = trained_by(tmp_path / "run" / "rank0.log")
    assert sorted(trained) == list(range(200)), "each batch exactly once"
    assert wasted > 0
