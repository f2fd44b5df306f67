"""The commands and environments of a job's processes."""

from persia.launcher.process_specs import ProcessSpecs, job_environment


def test_the_environment_of_a_job_is_not_that_of_one_rank(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("REPLICA_INDEX", "1")
    monkeypatch.setenv("KEPT", "yes")
    env = job_environment(nats_url="nats://h:1", job_name="job", extra={"EXTRA": "1"})
    assert "RANK" not in env
    assert "REPLICA_INDEX" not in env
    assert (env["KEPT"], env["EXTRA"]) == ("yes", "1")
    assert (env["PERSIA_NATS_URL"], env["PERSIA_JOB_NAME"]) == ("nats://h:1", "job")


def test_commands():
    specs = ProcessSpecs(
        env={"A": "1"}, global_config="g.yml", embedding_config="e.yml", launcher=("launcher",)
    )
    server = specs.server("embedding-parameter-server", 1, 2)
    assert server.name == "embedding-parameter-server-1"
    assert server.command == (
        "launcher",
        "embedding-parameter-server",
        "--port=0",
        "--replica-index=1",
        "--replica-size=2",
        "--embedding-config=e.yml",
        "--global-config=g.yml",
    )
    assert specs.server("embedding-worker", 0, 1).name == "embedding-worker-0"
    loader = specs.data_loader("load.py", ["-v"], 0, 3, {"B": "2"})
    assert loader.command[1:] == (
        "data-loader",
        "--replica-index",
        "0",
        "--replica-size",
        "3",
        "load.py",
        "-v",
    )
    assert loader.env == {"A": "1", "B": "2", "PERSIA_GLOBAL_CONFIG": "g.yml"}
    trainer = specs.nn_worker("train.py", ["--lr", "1"], 2, {})
    assert trainer.command[1:] == ("nn-worker", "--nproc-per-node", "2", "train.py", "--lr", "1")


def test_servers_without_a_global_config_use_their_defaults():
    command = ProcessSpecs(env={}, embedding_config="e.yml").server("embedding-worker", 0, 1).command
    assert command[-1] == "--embedding-config=e.yml"
