"""`persia-launcher ray submit` says what is wrong before it asks Ray for anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from persia.launcher import cli


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    Path("slots.yml").write_text("slots_config: {user: {dim: 8}}\n")
    Path("train.py").touch()


def submit(*arguments: str) -> Result:
    command = ["ray", "submit", "--embedding-config", "slots.yml", "--nn-worker", "train.py", *arguments]
    return CliRunner().invoke(cli, command)


def test_without_ray_it_says_what_to_install(folder):
    result = submit()
    assert result.exit_code == 1
    assert "pip install 'persia[ray]'" in result.output


@pytest.mark.parametrize("text", ["CPU", "CPU=many", "CPU=1=2", "CPU=1,GPU=1", "=1"])
def test_resources_that_cannot_be_read(folder, text):
    result = submit("--resources", "ranks", text)
    assert result.exit_code == 2
    assert f"{text!r} is not like 'CPU=8 GPU=1 memory=64e9'" in result.output


@pytest.mark.parametrize("text", ["", "CPU=0"])
def test_a_process_needs_something(folder, text):
    result = submit("--resources", "parameter-servers", text)
    assert result.exit_code == 2
    assert "parameter-servers must need something" in result.output


@pytest.mark.parametrize("amount", ["-1", "1.5", "nan", "inf"])
def test_amounts_that_ray_would_refuse(folder, amount):
    result = submit("--resources", "ranks", f"GPU=1 CPU={amount}")
    assert result.exit_code == 2
    assert f"CPU={amount} must be a positive whole number, or less than 1" in result.output


def test_a_role_has_its_resources_once(folder):
    result = submit("--resources", "ranks", "CPU=1", "--resources", "ranks", "CPU=2")
    assert result.exit_code == 2
    assert "ranks are there twice, the second time with 'CPU=2'" in result.output


@pytest.mark.parametrize("text", ["NAME", "=1"])
def test_a_variable_has_a_name_and_a_value(folder, text):
    result = submit("--env", text)
    assert result.exit_code == 2
    assert f"{text!r} is not like NAME=VALUE" in result.output


def test_missing_files_are_found_first(folder):
    result = submit("--data-loader", "nowhere.py")
    assert result.exit_code == 1
    assert "script 'nowhere.py' is not a file" in result.output
