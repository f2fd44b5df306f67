"""Settings from the environment: defaults, values, and refusals that name variable and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import PUBLISHED, TUNED
from settings import DEFAULT_SEED, DEFAULT_STALENESS, Settings, SettingsError

NAMES = ("ADULT_DATA", "ADULT_OUTPUT", "SEED", "REPRODUCIBLE", "EMBEDDING_STALENESS", "ENABLE_CUDA")
MODE_NAMES = ("CONSISTENCY", "ADULT_EVALUATIONS", "ADULT_RECIPE", "ADULT_PREPARED_BATCHES", "BATCH_SIZE")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *MODE_NAMES):
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    settings = Settings.from_environment()
    assert (settings.seed, settings.reproducible) == (DEFAULT_SEED, False)
    assert settings.embedding_staleness == DEFAULT_STALENESS


def test_reproducible_means_one_batch_at_a_time_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REPRODUCIBLE", "1")
    assert Settings.from_environment().embedding_staleness == 1
    monkeypatch.setenv("EMBEDDING_STALENESS", "5")
    assert Settings.from_environment().embedding_staleness == 5


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("data", "out", "0", "1", "7", "0"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", "slots.yml")
    assert Settings.from_environment() == Settings(
        data=Path("data"),
        output=Path("out"),
        seed=0,
        reproducible=True,
        embedding_staleness=7,
        slots=Path("slots.yml"),
        enable_cuda=False,
    )


def test_modes_that_bound_staleness_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDDING_STALENESS", "unbounded")
    assert Settings.from_environment().embedding_staleness is None
    monkeypatch.setenv("EMBEDDING_STALENESS", "7")
    monkeypatch.setenv("CONSISTENCY", "asynchronous")
    settings = Settings.from_environment()
    assert (settings.consistency, settings.embedding_staleness) == ("asynchronous", None)


def test_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment().num_evaluations == 5
    monkeypatch.setenv("ADULT_EVALUATIONS", "1")
    assert Settings.from_environment().num_evaluations == 1


def test_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.from_environment()
    assert (settings.recipe, settings.prepared_batches) == (PUBLISHED, False)
    monkeypatch.setenv("ADULT_RECIPE", "tuned")
    monkeypatch.setenv("ADULT_PREPARED_BATCHES", "1")
    settings = Settings.from_environment()
    assert (settings.recipe, settings.prepared_batches) == (TUNED, True)
    monkeypatch.setenv("BATCH_SIZE", "64")
    recipe = Settings.from_environment().recipe
    assert (recipe.batch_size, recipe.dense_rate) == (64, TUNED.dense_rate / 4)
    assert recipe.num_passes == TUNED.num_passes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ADULT_RECIPE", "best"),
        ("ADULT_PREPARED_BATCHES", "yes"),
        ("SEED", "-1"),
        ("SEED", "x"),
        ("REPRODUCIBLE", "yes"),
        ("EMBEDDING_STALENESS", "0"),
        ("ENABLE_CUDA", "2"),
        ("ADULT_EVALUATIONS", "0"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=f"{name} is '{value}'"):
        Settings.from_environment()
