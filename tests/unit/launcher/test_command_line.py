"""The command line: help, published names and environment variables, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys

import click
import numpy as np
import pytest
from click.testing import CliRunner

from persia import env
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import UnavailableError
from persia.launcher import cli
from persia.roles import embedding_worker, parameter_server
from persia.serving import server

SUBCOMMANDS = (
    "local",
    "nats-server",
    "embedding-parameter-server",
    "embedding-worker",
    "data-loader",
    "nn-worker",
)


NATS = {"PERSIA_NATS_URL": "nats://127.0.0.1:1"}  # nobody connects to it


def run(*arguments: str, **env: str | None):
    return CliRunner().invoke(cli, list(arguments), env={**NATS, **env})


def launch(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: these commands become another program."""
    command = [sys.executable, "-m", "persia.launcher", *arguments]
    return subprocess.run(
        command, env={**os.environ, **NATS, **env}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import json, os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'REPLICA_INDEX', 'REPLICA_SIZE')\n"
        "line = json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]) + '\\n'\n"
        "os.write(1, line.encode())\n"  # in one piece: two ranks share the pipe
        "sys.exit(int(os.environ.get('EXIT_CODE', 0)))\n"
    )
    return str(path)


def test_help_names_all_subcommands():
    output = run("--help").output
    assert all(name in output for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_subcommand_has_help(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_explains_every_command_and_option():
    def explain(command: click.Command, context: click.Context):
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help, parameter.opts
        if isinstance(command, click.Group):
            assert "...\n" not in command.get_help(context).replace("[ARGS]...", "")  # a summary that was cut
            for name in command.list_commands(context):
                one = command.get_command(context, name)
                explain(one, click.Context(one, context, name))

    explain(cli, click.Context(cli, info_name="persia-launcher"))


def test_a_misspelt_command_is_named():
    assert "did you mean 'nn-worker'?" in run("nn-worke").output
    assert "did you mean 'inspect'?" in run("checkpoint", "inspekt", "model").output


def test_help_imports_neither_torch_nor_the_native_module():
    code = (
        "import sys\n"
        "from persia.launcher import cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        "for name in ('local', 'nn-worker', 'data-loader', 'embedding-worker'):\n"
        "    cli([name, '--help'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'numpy', 'nats', 'persia._core') if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "module", "function", "port"),
    [
        ("embedding-parameter-server", parameter_server, "run_parameter_server", 8888),
        ("embedding-worker", embedding_worker, "run_embedding_worker", 8887),
    ],
)
def test_servers_take_the_published_options_and_variables(monkeypatch, name, module, function, port):
    seen = []
    monkeypatch.setattr(module, function, seen.append)
    variables = {"PERSIA_EMBEDDING_CONFIG": "e.yml", "PERSIA_GLOBAL_CONFIG": "g.yml"}
    assert run(name, **variables).exit_code == 0
    options = ["--port", "0", "--replica-index", "1", "--replica-size", "2", "--embedding-config", "x.yml"]
    assert run(name, *options, PERSIA_BIND_HOST="0.0.0.0", **variables).exit_code == 0
    default, given = seen
    assert (default.port, default.host) == (port, "127.0.0.1")
    assert (default.embedding_config, default.global_config) == ("e.yml", "g.yml")
    assert (default.replica_index, default.replica_size) == (0, 1)
    assert (given.port, given.host, given.embedding_config) == (0, "0.0.0.0", "x.yml")
    assert (given.replica_index, given.replica_size) == (1, 2)


def test_an_error_of_ours_is_one_line_and_exit_code_1(monkeypatch):
    def fail(_options):
        raise UnavailableError("no broker at nats://x")

    monkeypatch.setattr(parameter_server, "run_parameter_server", fail)
    result = run("embedding-parameter-server")
    assert result.exit_code == 1
    assert result.output == "persia-launcher: no broker at nats://x\n"


def test_debugging_shows_the_traceback(monkeypatch):
    def fail(_options):
        raise UnavailableError("no broker")

    monkeypatch.setattr(parameter_server, "run_parameter_server", fail)
    assert isinstance(run("embedding-parameter-server", LOG_LEVEL="debug").exception, UnavailableError)


def test_a_replica_index_out_of_range_is_refused():
    result = run("embedding-parameter-server", "--replica-index", "2", "--replica-size", "2")
    assert result.exit_code == 1
    assert "--replica-index 2 is not below --replica-size 2" in result.output


def test_one_rank_runs_the_script_with_its_arguments(script):
    result = launch("nn-worker", script, "--epochs", "3", "--help", EXIT_CODE="7")
    assert json.loads(result.stdout) == [
        ["--epochs", "3", "--help"],
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "REPLICA_INDEX": None, "REPLICA_SIZE": None},
    ]
    assert result.returncode == 7


def test_several_ranks_run_under_torchrun(script):
    result = launch("nn-worker", "--nproc-per-node", "2", script, "x")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(variables["RANK"] for _, variables in lines) == ["0", "1"]
    assert all(variables["WORLD_SIZE"] == "2" and arguments == ["x"] for arguments, variables in lines)


def test_a_failing_rank_fails_the_job(script):
    result = launch("nn-worker", "--nproc-per-node", "2", script, EXIT_CODE="7")
    assert result.returncode == 1
    assert re.fullmatch(
        r"persia-launcher: rank [01] ended with exit code 7.*", result.stderr.splitlines()[-1]
    )
    assert "Traceback" not in result.stderr  # of torchrun: it would bury the script's


def test_torchrun_stops_without_a_traceback(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, time; os.write(1, b'ready\\n'); time.sleep(1000)")
    command = [sys.executable, "-m", "persia.launcher", "nn-worker", "--nproc-per-node", "2", str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **NATS}, **pipes) as torchrun:
        assert [torchrun.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        torchrun.terminate()
        _, errors = torchrun.communicate(timeout=240)
    assert torchrun.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors


def test_ranks_end_with_torchrun_even_when_it_is_killed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(1000)")
    command = [sys.executable, "-m", "persia.launcher", "nn-worker", "--nproc-per-node", "2", str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env={**os.environ, **NATS}, **pipes) as torchrun:
        ranks = [int(torchrun.stdout.readline()) for _ in range(2)]
        assert all(os.path.exists(f"/proc/{rank}") for rank in ranks)
        torchrun.kill()
        # The pipe ends when the last rank, which holds it open, has ended.
        torchrun.communicate(timeout=240)


def test_verbose_shows_the_command(script):
    result = launch("data-loader", script, "a b", PERSIA_LAUNCHER_VERBOSE="1")
    assert result.stderr == f"+ REPLICA_INDEX=0 REPLICA_SIZE=1 {sys.executable} {script} 'a b'\n"


def test_several_machines_need_an_address(script):
    result = run("nn-worker", "--nnodes", "2", script)
    assert result.exit_code == 2
    assert "--master-addr" in result.output


def test_a_loader_knows_its_replica(script):
    result = launch("data-loader", "--replica-index", "1", "--replica-size", "2", script, "-v", EXIT_CODE="5")
    arguments, variables = json.loads(result.stdout)
    assert arguments == ["-v"]
    assert (variables["REPLICA_INDEX"], variables["REPLICA_SIZE"]) == ("1", "2")
    assert result.returncode == 5


@pytest.mark.parametrize(
    ("name", "variable"),
    [("nn-worker", "PERSIA_NN_WORKER_ENTRY"), ("data-loader", "PERSIA_DATALOADER_ENTRY")],
)
def test_the_entry_may_come_from_the_environment(script, name, variable):
    result = launch(name, "--", "--flag", **{variable: script})
    assert json.loads(result.stdout)[0] == ["--flag"]


def test_a_lingering_loader_that_fails_ends_at_once(script):
    assert launch("data-loader", "--linger", script, EXIT_CODE="5").returncode == 5


@pytest.mark.parametrize("name", ["nn-worker", "data-loader"])
@pytest.mark.parametrize(("url", "complaint"), [(None, "nats://127.0.0.1:4222"), ("http://x", "'http://x'")])
def test_a_script_does_not_start_without_a_usable_broker_url(script, name, url, complaint):
    result = run(name, script, PERSIA_NATS_URL=url)
    assert result.exit_code == 1
    assert complaint in result.output
    assert len(result.output.splitlines()) == 1


def test_a_nats_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("nats-server", "--port", str(port))
    assert result.exit_code == 1
    assert f"127.0.0.1:{port}" in result.output
    assert "PERSIA_NATS_PORT" in result.output
    assert len(result.output.splitlines()) == 1


def serve_options(tmp_path):
    """Each option of `serve` that takes a value, with one."""
    return {
        "--model-name": "ads",
        "--embedding-config": str(tmp_path / "slots.yml"),
        "--host": "::1",
        "--port": "1",
        "--max-batch-size": "2",
        "--max-delay-ms": "3",
        "--max-queued": "4",
        "--max-request-mib": "5",
        "--threads": "6",
        "--timeout": "7",
        "--poll": "8",
        "--sample": str(tmp_path / "sample"),
        "--incremental-dir": str(tmp_path / "packets"),
        "--incremental-poll": "9",
        "--max-packets-behind": "10",
        "--server-status": "h:11",
        "--metrics-port": "12",
        "--nats-url": "nats://h:13",
        "--replica-index": "14",
        "--replica-size": "15",
        "--device-id": "16",
        "--verify-key": "ads.pub",
        "--http-port": "17",
        "--gate": str(tmp_path / "gate"),
        "--on-missing-server": "fail",
        "--gate-drift": "0.5",
        "--gate-auc": "0.75",
        "--tls-cert": "tls.crt",
        "--tls-key": "tls.key",
        "--tls-client-ca": "ca.crt",
        "--canary": str(tmp_path / "next"),
        "--canary-share": "0.25",
        "--shadow-share": "0.125",
        "--canary-max-errors": "18",
        "--canary-max-drift": "0.375",
        "--request-log": str(tmp_path / "log"),
        "--request-log-share": "0.625",
        "--request-log-mib": "19",
    }


@pytest.fixture
def served(monkeypatch, tmp_path):
    """What the server was started with: (list of ModelOptions, ServingOptions) of each call."""
    seen = []
    monkeypatch.setattr(server, "serve", lambda models, options: seen.append((models, options)))
    (tmp_path / "slots.yml").write_text("slots_config: {user: {dim: 8}}")
    return seen


def test_every_option_of_serve_reaches_the_server(monkeypatch, tmp_path, served):
    """By its effect: they are handed on by their names, and one that no field has would be lost."""
    (tmp_path / "sample").write_bytes(b"batch")
    users = IDTypeFeatureWithSingleID("user", np.arange(2, dtype=np.uint64))
    (tmp_path / "gate").write_bytes(PersiaBatch([users], labels=[Label(np.eye(2)[:, :1])]).to_bytes())
    given = serve_options(tmp_path)
    for variable in ("PERSIA_VERIFY_KEY", "PERSIA_TRUST_SCRIPTS"):
        monkeypatch.setenv(variable, "")  # which the command replaces
    monkeypatch.delenv("PERSIA_TRUST_SCRIPTS")
    command = cli.get_command(click.Context(cli), "serve")
    options = {option for one in command.params if isinstance(one, click.Option) for option in one.opts}
    assert options == given.keys() | {
        "--embedding-worker",
        "--model",
        "--trust-scripts",
        "--allow-nonfinite",
        "--require-token",
    }
    words = [
        "--trust-scripts",
        "--allow-nonfinite",
        "--require-token",
        *(word for pair in given.items() for word in pair),
    ]
    result = run("serve", str(tmp_path / "model"), *words)
    assert result.exit_code == 0, result.output
    (((model,), serving),) = served
    settings = model.settings
    assert (env.get_verify_keys(), env.trusts_scripts()) == (["ads.pub"], True)
    assert (settings.name, settings.sample, settings.poll_s, settings.servers) == (
        "ads",
        b"batch",
        8,
        ("h:11",),
    )
    assert (settings.location.name, settings.device.index) == ("model", 16)
    assert list(settings.slots.slots_config) == ["user"]
    assert (settings.follow.poll_s, settings.follow.max_behind) == (9, 10)
    assert (settings.follow.packets.name, settings.follow.checkpoints) == ("packets", settings.location)
    batching = model.batching
    assert (batching.max_batch_size, batching.max_delay_s, batching.max_queued) == (2, 0.003, 4)
    assert (batching.num_threads, serving.max_request_bytes, serving.timeout_s) == (6, 5 << 20, 7)
    assert (serving.host, serving.port, serving.metrics_port, serving.http_port) == ("::1", 1, 12, 17)
    assert settings.allow_nonfinite
    assert (len(settings.gate.samples), settings.gate.max_drift, settings.gate.min_auc) == (1, 0.5, 0.75)
    files = serving.tls_cert, serving.tls_key, serving.tls_client_ca
    assert (serving.require_token, *map(str, files)) == (True, "tls.crt", "tls.key", "ca.crt")
    assert (serving.nats_url, serving.replica_index, serving.replica_size) == ("nats://h:13", 14, 15)
    canary, log = model.canary, model.request_log
    assert (canary.location.name, canary.share, canary.shadow_share) == ("next", 0.25, 0.125)
    assert (canary.max_errors, canary.drift_limit) == (18, 0.375)
    assert (log.path, log.log_share, log.max_log_bytes) == (tmp_path / "log", 0.625, 19 << 20)


def test_serve_with_rows_of_embedding_workers(tmp_path, served):
    workers = ("--embedding-worker", "h:1", "--embedding-worker", "h:2")
    assert run("serve", str(tmp_path / "model"), *workers).exit_code == 0
    (((model,), _),) = served
    settings = model.settings
    assert (model.canary, model.request_log, model.rows_of) == (None, None, None)
    assert settings.slots is None
    assert settings.embeddings is not None
    assert settings.default_rows is None
    defaults = ("--on-missing-server", "default", "--embedding-config", str(tmp_path / "slots.yml"))
    assert run("serve", str(tmp_path / "model"), *workers, *defaults).exit_code == 0
    assert served[1][0][0].settings.default_rows is not None
    result = run("serve", str(tmp_path / "model"), *workers, *defaults[:2])
    assert result.exit_code == 2
    assert "--embedding-config for the shapes" in result.output
    result = run("serve", str(tmp_path / "model"), "--shadow-share", "0.5")
    assert "--shadow-share and --canary-max-drift need --canary" in result.output


def test_serve_several_models(tmp_path, served):
    slots = str(tmp_path / "slots.yml")
    own = f"ads=model/,embedding-config={slots},incremental-dir=packets/,threads=3"
    own += ",canary=next/,canary-share=0.5"
    head = "head=head/,rows=ads"
    result = run("serve", "--model", own, "--model", head, "--poll", "8", "--max-queued", "9")
    assert result.exit_code == 0, result.output
    (((ads, head), _),) = served
    assert (ads.settings.name, head.settings.name) == ("ads", "head")
    assert (ads.settings.location.name, ads.settings.follow.packets.name) == ("model", "packets")
    assert list(ads.settings.slots.slots_config) == ["user"]
    assert (ads.canary.share, ads.batching.num_threads, ads.rows_of) == (0.5, 3, None)
    assert (head.canary, head.batching.num_threads, head.rows_of) == (None, 1, "ads")
    assert (head.settings.follow, head.settings.slots, head.settings.embeddings) == (None, None, None)
    for one in (ads, head):  # by the options for all
        assert (one.settings.poll_s, one.batching.max_queued) == (8, 9)


_A_AND_B = ("--model", "a=x", "--model", "b=y")
_HEAD_OF_A = ("--model", "a=x", "--model", "b=y,rows=a")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "give either CHECKPOINT or, once for each of several models, --model NAME=DIR"),
        (("model/", "--model", "ads=model/"), "give either CHECKPOINT or"),
        (("--model", "model/"), "--model 'model/' is not like NAME=DIR"),
        (("--model", "a=x", "--model", "a=y"), "--model a is given twice"),
        (("--model", "a=x,rows=b", "--model", "b=y"), "rows=b names no model before it"),
        (("--model", "a=x,port=1"), "'port' is no option of one model: choose among rows, embedding-config"),
        (("--model", "a=x,threads=0"), "0 is not in the range"),
        (("--model", "a=x,rows"), "'rows' has no value"),
        (("--model", "a=x,threads=1,threads=2"), "threads is given twice"),
        (("--model", "a=x", "--model-name", "ads"), "--model-name is of one model"),
        (
            (*_A_AND_B, "--request-log", "log"),
            "--request-log is the same for several models: give each its own",
        ),
        ((*_A_AND_B, "--canary", "next/"), "--canary is the same for several models: give each its own"),
        ((*_A_AND_B, "--incremental-dir", "p/"), "rows=NAME to the others"),
        (
            ("--model", "a=x,incremental-dir=p", "--model", "b=y,incremental-dir=p/"),
            "rows=NAME to the others",
        ),
        ((*_HEAD_OF_A, "--incremental-dir", "p/"), "give incremental-dir=DIR to a alone, behind a comma"),
        (
            ("--model", "a=x", "--model", "b=y,rows=a,incremental-dir=p"),
            "b: rows=a has no packets of its own",
        ),
        ((*_HEAD_OF_A, "--embedding-worker", "h:1"), "leave rows= out"),
    ],
)
def test_what_is_wrong_with_several_models(served, words, error):
    result = run("serve", *words)
    assert (result.exit_code, served) == (2, [])
    assert error in " ".join(result.output.split())


@pytest.mark.parametrize("option", ["--verify-key", "--sign-key"])
def test_an_empty_key_is_refused_and_not_left_out(option: str) -> None:
    """A script's `--verify-key "$KEY"` without KEY would check nothing."""
    command = ["serve", "model"] if option == "--verify-key" else ["checkpoint", "dump", "model"]
    result = run(*command, option, "")
    assert result.exit_code == 2, result.output
    assert "it is empty: give a file" in result.output
