"""`persia-launcher slurm` writes one batch script for a whole job."""

from __future__ import annotations

import difflib
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from persia.launcher import cli

GOLDEN = Path(__file__).with_name("golden")
# Arguments. Of the second script, the golden file has the lines that differ.
JOBS = {
    "small": ["--nn-worker", "train.py"],
    "large": [
        *("--nn-worker", "train.py", "--data-loader", "loader.py", "--loader-args", "--day 'day 1'"),
        *("--global-config", "global.yml", "--job-name", "criteo", "--parameter-servers", "4"),
        *("--embedding-workers", "3", "--data-loaders", "2", "--nodes", "2", "--nproc-per-node", "8"),
        *("--sbatch", "--partition=cpu --time=12:00:00", "--setup", "source 'my env/bin/activate'"),
        *("--sbatch-for", "ranks", "--partition=gpu --gpus-per-node=8"),
        *("--sbatch-for", "parameter-servers", "--cpus-per-task=16 --mem-per-cpu=8G"),
        *("--", "--lr", "it's $HOME"),
    ],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("slots.yml").write_text("slots_config: {user: {dim: 8}}\n")
    Path("global.yml").write_text("{}\n")
    Path("train.py").touch()
    Path("loader.py").touch()
    return tmp_path


def written(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["slurm", "--embedding-config", "slots.yml", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_scripts(folder):
    scripts = {name: written(*arguments) for name, arguments in JOBS.items()}
    for script in scripts.values():
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    small, large = (script.replace(str(folder), "/shared") for script in scripts.values())
    assert small == (GOLDEN / "slurm_small.sh").read_text()
    changes = difflib.unified_diff(small.splitlines(), large.splitlines(), n=0, lineterm="")
    assert "\n".join(changes) + "\n" == (GOLDEN / "slurm_large.diff").read_text()


def test_servers_with_standbys_are_started_again(folder):
    Path("global.yml").write_text("embedding_parameter_server_config: {standbys: 1}\n")
    options = ["--global-config", "global.yml", "--parameter-servers", "2"]
    script = written(*JOBS["small"], *options, "--sbatch-for", "parameter-servers", "--mem=8G")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.count("#SBATCH --ntasks=2\n#SBATCH --mem=8G\n") == 2
    steps = [line for line in script.splitlines() if line.startswith("    bash -c")]
    assert [("&& exit; sleep 1" in step, "--standby" in step) for step in steps] == [
        *((True, False), (False, False), (True, True), (False, False))
    ]
    assert "srun --het-group=3 " in script  # the ranks
    assert 'NODELIST_HET_GROUP_3"' in script


def test_it_is_written_to_a_file(folder):
    assert written(*JOBS["small"], "--output", "job.sh") == ""
    assert (folder / "job.sh").read_text() == written(*JOBS["small"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sbatch", "--time 12:00:00"], "sbatch option '12:00:00' of parameter-servers"),
        (["--sbatch-for", "ranks", "--comment='a\nb'"], "sbatch option '--comment=a\\nb' of ranks"),
        (["--data-loader", "missing.py"], "script 'missing.py' is not a file"),
        (["--sbatch-for", "rank", "--gpus=1"], "'rank' is not one of"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, folder):
    result = CliRunner().invoke(
        cli, ["slurm", "--embedding-config", "slots.yml", *JOBS["small"], *arguments, "--output", "job.sh"]
    )
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert not (folder / "job.sh").exists()
