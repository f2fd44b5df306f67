"""`persia-launcher local` runs a whole job, and takes all of it down when one process fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from persia.testing import LocalNats

DEADLINE_S = 240.0


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


class Job:
    """A job with two tiny scripts, whose processes write their process numbers to the output."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.has_global_config = True
        self.write("embedding_config.yml", "slots_config: {user: {dim: 8}}\n")
        self.write("global_config.yml", "{}\n")
        self.write("loader.py", "")
        self.write("train.py", "")

    def write(self, name: str, text: str) -> None:
        # One write a line: unbuffered prints of two ranks would mix.
        preamble = (
            "import os, sys; sys.stdout.write(f'pid {os.getpid()}\\n')\n" if name.endswith(".py") else ""
        )
        (self.folder / name).write_text(preamble + text)

    def start(self, *arguments: str, script_arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        global_config = ("--global-config", str(self.folder / "global_config.yml"))
        command = [
            *(sys.executable, "-m", "persia.launcher", "local"),
            *("--nn-worker", str(self.folder / "train.py"), "--data-loader", str(self.folder / "loader.py")),
            *("--embedding-config", str(self.folder / "embedding_config.yml")),
            *(global_config if self.has_global_config else ()),
            *(*arguments, "--", *script_arguments),
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *arguments: str, script_arguments: tuple[str, ...] = ()) -> tuple[int, str]:
        with self.start(*arguments, script_arguments=script_arguments) as process:
            output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def pids_in(output: str) -> list[int]:
    """Of the scripts, which print it, and of the servers, which log it."""
    return [int(pid) for pid in re.findall(r"pid (\d+)", output)]


# Ends when all servers are ready, so that all of them have to be taken down.
AWAIT_SERVERS = """
from persia import env
from persia.messaging.discovery import Directory
from persia.messaging.session import NatsSession
session = NatsSession(env.get_nats_url(), env.get_job_name(), name="script")
session.connect(100)
directory = Directory(session)
(server, *_) = directory.wait_for("embedding-parameter-server", 100)
directory.wait_for("embedding-worker", 100)
session.close()
"""


def test_a_job_that_succeeds(job):
    marker = str(job.folder / "loaded-")  # a rank that ends ends the loaders, too
    await_loaders = (
        f"import time\nwhile not all(os.path.exists({marker!r} + i) for i in '01'): time.sleep(0.01)\n"
    )
    job.write("train.py", AWAIT_SERVERS + await_loaders + "print('trains with', sys.argv[1:])")
    loads = "print('loads', os.environ['REPLICA_INDEX'], sys.argv[1:], flush=True)\n"
    job.write("loader.py", loads + f"open({marker!r} + os.environ['REPLICA_INDEX'], 'w').close()")
    sizes = ("--parameter-servers", "2", "--embedding-workers", "2", "--data-loaders", "2")
    code, output = job.run(*sizes, "--loader-args", "-v 'a b'", script_arguments=("--lr", "1"))
    assert code == 0, output
    assert re.search(r"^nn-worker +\| trains with \['--lr', '1'\]$", output, re.MULTILINE)
    for index in range(2):
        line = rf"^data-loader-{index} +\| loads {index} \['-v', 'a b'\]$"
        assert re.search(line, output, re.MULTILINE), output
        assert f"embedding-parameter-server-{index}" in output
        assert f"embedding-worker-{index}" in output
    ended = output.splitlines()[-4:]
    assert all(line.endswith(" stopped") for line in ended), "nothing else is said of a normal end"
    assert not re.search(r"^nats ", output, re.MULTILINE), "a newcomer would take its warning for a mistake"
    assert len(set(pids_in(output))) >= 7
    assert not any(is_alive(pid) for pid in pids_in(output))


def test_a_job_with_two_ranks_and_without_a_global_config(job):
    job.has_global_config = False
    job.write("train.py", "sys.stdout.write(f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\")")
    code, output = job.run("--nproc-per-node", "2")
    assert code == 0, output
    assert "rank 0 of 2" in output
    assert "rank 1 of 2" in output


def test_two_jobs_without_a_name_do_not_meet_on_one_broker(tmp_path):
    """Each of them would refuse the servers of the other, or take them for its own."""
    folders = [tmp_path / name for name in "ab"]
    with LocalNats() as nats:
        processes = []
        for folder, other in (folders, folders[::-1]):
            folder.mkdir()
            job = Job(folder)
            meet = f"""
import time
open({str(folder / "here")!r}, "w").close()
deadline = time.monotonic() + 100
while not os.path.exists({str(other / "here")!r}):
    assert time.monotonic() < deadline, "the other job does not run"
    time.sleep(0.05)
print("job", env.get_job_name(), flush=True)
"""
            job.write("train.py", AWAIT_SERVERS + meet)
            processes.append(job.start("--nats-url", nats.url))
        outputs = [process.communicate(timeout=2 * DEADLINE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    names = {re.findall(r"\| job (local-\w+)$", output, re.MULTILINE)[0] for output in outputs}
    assert len(names) == 2


@pytest.mark.parametrize(("failing", "name"), [("train.py", "nn-worker"), ("loader.py", "data-loader-0")])
def test_a_script_that_fails_ends_the_job_with_its_error(job, failing, name):
    job.write("train.py", "import time; time.sleep(1000)")
    job.write(failing, AWAIT_SERVERS + "print('last words'); raise SystemExit(7)")
    code, output = job.run()
    assert code == 7, output
    verdict = output.partition(f"{name} ended with exit code 7")[2]
    assert "    last words\n" in verdict
    assert not any(is_alive(pid) for pid in pids_in(output))


def test_a_script_that_fails_again_after_its_restart_ends_the_job(job):
    job.write("train.py", "print('tried'); raise SystemExit(7)")
    code, output = job.run("--max-restarts", "1")
    assert code == 7, output
    assert output.count("| tried\n") == 2
    assert (
        "nn-worker ended with exit code 7; every process is started again in 0 s (restart 1 of 1)" in output
    )
    assert "restarts: 1 of 1 (nn-worker 1)" in output
    assert "nn-worker ended with exit code 7; the job was stopped" in output
    assert not any(is_alive(pid) for pid in pids_in(output))


def test_a_rank_that_fails_shows_its_traceback(job):
    job.write(
        "train.py", "if os.environ['RANK'] == '1': raise KeyError('of rank 1')\nimport time; time.sleep(1000)"
    )
    code, output = job.run("--nproc-per-node", "2")
    assert code == 1, output
    verdict = output.partition("nn-worker ended with exit code 1")[2]
    assert "    KeyError: 'of rank 1'\n" in verdict
    assert "rank 1 ended with exit code 1" in verdict
    assert "ChildFailedError" not in output


def test_training_that_leaves_the_stream_early_succeeds(job):
    """Its loader, which has nobody to send to any more, ends before the training does."""
    marker = str(job.folder / "left")
    job.write("loader.py", f"open({marker!r}, 'w').close(); raise SystemExit(1)")
    await_marker = f"import time\nwhile not os.path.exists({marker!r}): time.sleep(0.01)\n"
    job.write("train.py", await_marker + "time.sleep(1); print('trained')")
    code, output = job.run()
    assert code == 0, output
    assert "| trained\n" in output


def test_a_server_that_dies_ends_the_job(job):
    job.write("train.py", AWAIT_SERVERS + "import time; os.kill(server.pid, 9); time.sleep(1000)")
    code, output = job.run()
    assert code == 128 + signal.SIGKILL, output
    assert "embedding-parameter-server-0 was ended by SIGKILL" in output
    assert not any(is_alive(pid) for pid in pids_in(output))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_takes_everything_down(job, number):
    job.write("train.py", AWAIT_SERVERS + "print('training'); import time; time.sleep(1000)")
    with job.start() as process:
        output = ""
        for line in process.stdout:
            output += line
            if line.endswith("| training\n"):
                break
        process.send_signal(number)
        output += process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 128 + number, output
    assert "stopping ..." in output
    assert " WARNING " not in output
    assert not any(is_alive(pid) for pid in pids_in(output))


def test_nothing_outlives_a_launcher_that_is_killed(job):
    job.write("train.py", AWAIT_SERVERS + "print('training', flush=True); import time; time.sleep(1000)")
    with job.start() as process:
        output = ""
        for line in process.stdout:
            output += line
            if line.endswith("| training\n"):
                break
        process.kill()
    deadline = time.monotonic() + DEADLINE_S
    while any(is_alive(pid) for pid in pids_in(output)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("embedding_config.yml", "slots_config: {user: {dimm: 8}}", "dimm"),
        ("global_config.yml", "common: {}", "common_config"),
        ("loader.py", None, "loader.py"),
    ],
)
def test_what_is_wrong_is_found_before_anything_starts(job, name, content, complaint):
    (job.folder / name).unlink()
    if content is not None:
        job.write(name, content)
    code, output = job.run()
    assert code == 1
    assert complaint in output
    assert len(output.splitlines()) == 1
