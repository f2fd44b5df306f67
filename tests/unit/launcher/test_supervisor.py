"""The supervisor passes output on, tells ends in order, and leaves nothing behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from persia.errors import FailedPreconditionError
from persia.launcher import supervisor as supervisor_module
from persia.launcher.supervisor import ProcessSpec, Supervisor

DEADLINE_S = 120.0


def python(name: str, code: str) -> ProcessSpec:
    return ProcessSpec(name=name, command=(sys.executable, "-u", "-c", code), env=dict(os.environ))


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie, which nobody may collect here, does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def lines():
    return []


@pytest.fixture
def supervisor(lines):
    with Supervisor(lambda name, line: lines.append((name, line))) as supervisor:
        yield supervisor


def test_output_and_errors_come_line_by_line_in_order(supervisor, lines):
    process = supervisor.start(
        python("p", "import sys; print('one'); print('two', file=sys.stderr); print('three')")
    )
    assert process.wait(DEADLINE_S) == 0
    assert lines == [("p", "one"), ("p", "two"), ("p", "three")]
    assert process.output == "one\ntwo\nthree"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Popen has no process_group")
def test_a_process_leads_a_group_in_this_session(supervisor):
    # Niceness counts among processes of one session: a server's dumping threads give way to the other ones.
    process = supervisor.start(python("p", "import os; print(os.getpgid(0), os.getsid(0))"))
    assert process.wait(DEADLINE_S) == 0
    assert process.output == f"{process.pid} {os.getsid(0)}"


def test_the_kept_output_is_bounded(supervisor):
    process = supervisor.start(python("p", "for i in range(5000): print(i)"))
    assert process.wait(DEADLINE_S) == 0
    assert process.output.splitlines()[0] == "3000"


def test_ends_are_told_in_their_order_with_exit_codes(supervisor, tmp_path):
    go_on = tmp_path / "go_on"
    wait = f"import os, sys, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nsys.exit(4)"
    supervisor.start(python("second", wait))
    supervisor.start(python("first", "raise SystemExit(3)"))
    ended = [supervisor.next_ended(DEADLINE_S)]
    go_on.touch()
    ended.append(supervisor.next_ended(DEADLINE_S))
    assert [(process.name, process.exit_code) for process in ended] == [("first", 3), ("second", 4)]
    assert supervisor.next_ended(0.0) is None


def test_a_signal_shows_as_a_negative_exit_code(supervisor):
    process = supervisor.start(python("p", "import time; time.sleep(1000)"))
    assert process.exit_code is None
    process.send_signal(signal.SIGKILL)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # after its end: no harm


def test_names_are_taken_while_the_process_runs(supervisor):
    process = supervisor.start(python("p", "import time; time.sleep(1000)"))
    with pytest.raises(FailedPreconditionError, match="p is running"):
        supervisor.start(process.spec)
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    assert supervisor.start(process.spec).pid != process.pid


def test_a_process_knows_how_often_it_was_started_again(supervisor, monkeypatch):
    monkeypatch.setenv("PERSIA_RESTARTS", "7")  # of this process
    spec = python("p", "import os; print(os.environ['PERSIA_RESTARTS'])")
    for expected in ("0", "1", "2"):
        process = supervisor.start(spec)
        assert process.wait(DEADLINE_S) == 0
        assert process.output == expected
    other = supervisor.start(replace(spec, name="other"))
    assert other.wait(DEADLINE_S) == 0
    assert other.output == "0"


@pytest.mark.parametrize(
    "command",
    ["cat /proc/self/environ", "grep Sig /proc/self/status", "readlink /proc/self/fd/0", "ls /proc/self/fd"],
)
def test_a_process_starts_as_it_would_without_a_supervisor(supervisor, command):
    # Shells drop, reset or refuse most of these, and Python adds LC_CTYPE to the C locale.
    env = {"A.B": "1", "my-var": "2", "BASH_FUNC_f%%": "() { :; }", "OPTIND": "x", "IFS": ":", "LANG": "C"}
    env |= {"PATH": os.environ["PATH"], "PERSIA_RESTARTS": "0"}
    process = supervisor.start(ProcessSpec(name="p", command=command.split(), env=env))
    assert process.wait(DEADLINE_S) == 0
    expected = subprocess.run(
        command.split(), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True
    )
    assert process.output == expected.stdout.rstrip("\n")


def test_a_process_starts_when_the_watchdog_was_killed(supervisor):
    first = supervisor.start(python("first", "pass"))
    assert first.wait(DEADLINE_S) == 0
    supervisor._watchdog.kill()
    supervisor._watchdog.wait()
    second = supervisor.start(python("second", "print('on')"))
    assert (second.wait(DEADLINE_S), second.output) == (0, "on")


def test_a_command_that_cannot_be_started_is_refused(supervisor, tmp_path):
    spec = ProcessSpec(name="p", command=("tool",), env={"PATH": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="tool"):
        supervisor.start(spec)
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho on\n")
    with pytest.raises(PermissionError, match="tool"):
        supervisor.start(spec)
    tool.chmod(0o755)
    process = supervisor.start(spec)
    assert (process.wait(DEADLINE_S), process.output) == (0, "on")


def test_stop_terminates_and_then_kills(supervisor, lines):
    code = "import signal; signal.signal(signal.SIGTERM, {}); print('ready'); signal.pause(); signal.pause()"
    polite = supervisor.start(python("polite", code.format("lambda *_: exit(5)")))
    stubborn = supervisor.start(python("stubborn", code.format("signal.SIG_IGN")))
    wait_until(lambda: len(lines) == 2)
    supervisor.stop(grace_s=5.0)  # longer than a busy machine keeps the polite one
    assert polite.exit_code == 5
    assert stubborn.exit_code == -signal.SIGKILL
    supervisor.stop()


def test_stop_waits_for_each_stage_before_the_next(supervisor, lines):
    end = "lambda *_: (time.sleep(0.3), exit(print('bye')))"
    code = f"import signal, time; signal.signal(signal.SIGTERM, {end}); print('on'); signal.pause()"
    for stage in (2, 0, 1):
        supervisor.start(replace(python(f"stage {stage}", code), stop_stage=stage))
    wait_until(lambda: len(lines) == 3)
    supervisor.stop()
    assert lines[3:] == [(f"stage {stage}", "bye") for stage in range(3)]


def test_what_a_process_leaves_behind_ends_with_it(supervisor, lines):
    supervisor.start(python("p", "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)")).wait(
        DEADLINE_S
    )
    grandchild = int(lines[0][1])
    wait_until(lambda: not is_alive(grandchild))


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_daemon_that_keeps_the_pipe_delays_the_end_for_a_bounded_time(supervisor, lines, is_writing):
    write = "while True: print('on', flush=True)" if is_writing else "import time; time.sleep(1000)"
    start = f"import subprocess as s, sys\ns.Popen([sys.executable, '-c', {write!r}], start_new_session=True)"
    print_pid = start.replace("\n", "\nprint(") + ".pid); import time; time.sleep(1000)"
    process = supervisor.start(python("p", print_pid))
    wait_until(lambda: any(line.isdigit() for _, line in lines))
    joined = []

    def join(timeout_s: float) -> None:
        joined.append(timeout_s)
        known = len(lines)
        wait_until(lambda: not is_writing or len(lines) > known + 1)

    process._reader.join = join
    process.send_signal(signal.SIGKILL)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    os.kill(int(next(line for _, line in lines if line.isdigit())), signal.SIGKILL)
    assert joined == [1.0] * (5 if is_writing else 1)


def test_a_process_starts_while_another_thread_stops_all(supervisor, monkeypatch):
    stopping = threading.Thread(target=supervisor.stop)

    class Stopped(supervisor_module.ManagedProcess):
        def __init__(self, *arguments):
            stopping.start()
            stopping.join(0.5)  # it waits for the start
            super().__init__(*arguments)

    monkeypatch.setattr(supervisor_module, "ManagedProcess", Stopped)
    process = supervisor.start(python("p", "import time; time.sleep(1000)"))
    assert process.wait(DEADLINE_S) == -signal.SIGTERM  # by the watchdog, as `stop` did not know it yet
    stopping.join()


def test_the_watchdog_forgets_a_group_before_its_number_is_free(supervisor):
    supervisor.start(python("first", "pass")).wait(DEADLINE_S)
    told = []

    class Pipe(io.FileIO):
        def write(self, data):
            told.append((data, os.path.exists(f"/proc/{-int(data)}")))
            return super().write(data)

    with supervisor._watchdog.stdin as pipe:
        supervisor._watchdog.stdin = Pipe(os.dup(pipe.fileno()), "w")
    process = supervisor.start(python("second", "pass"))
    process.wait(DEADLINE_S)
    assert told == [(b"-%d\n" % process.pid, True)]


@pytest.mark.parametrize("is_starting", [False, True])
def test_nothing_outlives_a_supervisor_that_is_killed(is_starting):
    code = """
import os, sys, time
from persia.launcher import supervisor
from persia.launcher.supervisor import ProcessSpec, Supervisor

class Started(supervisor.ManagedProcess):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        print(self.pid, flush=True)
        time.sleep(1000)

if sys.argv[1] == "True":  # it does not return from starting the process
    supervisor.ManagedProcess = Started
sleeper = ProcessSpec(name="p", command=("sleep", "1000"), env=dict(os.environ))
print(Supervisor().start(sleeper).pid, flush=True)
time.sleep(1000)
"""
    command = [sys.executable, "-c", code, str(is_starting)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        sleeper = int(killed.stdout.readline())
        assert is_alive(sleeper)
        killed.kill()
    wait_until(lambda: not is_alive(sleeper))


def test_a_detached_watchdog_outlives_the_children_of_its_supervisor():
    """Ray kills them when a process of its own ends, and would so leave the children of these."""
    code = """
import os, time
from persia.launcher.supervisor import ProcessSpec, Supervisor

script = "trap '' TERM; sleep 1000 & echo $!; wait"
supervisor = Supervisor(lambda _name, line: print(line, flush=True), detach_watchdog=True)
supervisor.start(ProcessSpec(name="p", command=("sh", "-c", script), env=dict(os.environ)))
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as killed:
        deaf = int(killed.stdout.readline())
        killed.send_signal(signal.SIGSTOP)  # it would end what its child leaves
        for task in Path(f"/proc/{killed.pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        assert is_alive(deaf)
        killed.kill()
    wait_until(lambda: not is_alive(deaf))
