"""Sections and documents: errors are persia's own, in one line, and name key, value and remedy."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import AliasChoices, Field

from persia.errors import ConfigError, CorruptionError
from persia.validation import Count, Hex, Number, Section, read_document, read_section, to_json


class Inner(Section):
    size: Annotated[int, Field(ge=1, le=8)] = 1
    name: str = ""


class Outer(Section):
    inner: Inner = Inner()
    by_name: dict[str, Inner] = Field(default_factory=dict, validation_alias=AliasChoices("by_name", "named"))

    def check(self) -> None:
        if self.inner.size == 7:
            raise ConfigError("inner.size=7 is unlucky: take 8")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"size": 9}}, "inner.size=9 must be at most 8"),
        ({"inner": {"sise": 1}}, "inner.sise=1 is not a known key: did you mean 'size'?"),
        ({"inner": {True: 1}}, "inner.True=1 is not a known key: the keys here are size, name"),
        ({"inner": {"name": 3}}, "inner.name=3 must be a valid string: quote it"),
        ({"inner": {"size": 7}}, "inner.size=7 is unlucky: take 8"),
        ({"by_name": {3: {}}}, "by_name has the name 3, which must be a valid string: quote it"),
        ({"named": {"a": {"size": 0}}}, "named.a.size=0 must be at least 1"),
        ({"named": {}, "by_name": {}}, "by_name is also given as named, another spelling of it: keep one"),
        ({"inner": None}, "inner is empty: give it keys, or {} for the defaults"),
    ],
)
def test_the_first_problem_is_told_in_one_line(values: dict[object, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_section(Outer, values)
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as caught:
        read_section(Outer, values, "top")
    assert str(caught.value) == f"top.{message}"


def test_constructor_and_replace_obey_the_same_rules() -> None:
    outer = Outer(inner=Inner(size=3))
    assert outer.replace(inner=outer.inner.replace(size=4)) == Outer(inner=Inner(size=4))
    for make in (lambda: Inner(size=9), lambda: outer.inner.replace(size=9)):
        with pytest.raises(ConfigError, match="size=9 must be at most 8"):
            make()
    with pytest.raises(AttributeError, match="frozen"):
        outer.inner.size = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(outer)) == outer


@dataclass(frozen=True)
class Part:
    num: Count
    share: Number = 0.0
    digest: Hex | None = None


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    by_name: dict[str, Part]


def test_documents_survive_json_and_ignore_what_they_do_not_know() -> None:
    whole = Whole((Part(2**64 - 1, 0.5, "00ff"), Part(0)), {"a": Part(1)})
    assert read_document(Whole, {**to_json(whole), "newer": 1}, "w.json") == whole


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({}, "num is missing: it has no default, so add it"),
        ({"num": True}, "num=true must be a valid integer"),
        ({"num": 1.0}, "num=1.0 must be a valid integer"),
        ({"num": "1"}, "num='1' must be a valid integer"),
        ({"num": 2**64}, "num=18446744073709551616 must be at most 18446744073709551615"),
        ({"num": 1, "share": float("inf")}, "share=inf must be a finite number"),
        ({"num": 1, "digest": "0"}, "digest='0' must match pattern"),
    ],
)
def test_documents_are_read_without_trust(part: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptionError) as caught:
        read_document(Whole, {"parts": [part], "by_name": {}}, "w.json")
    assert str(caught.value).startswith(f"w.json: parts.0.{message}")


def test_a_long_value_does_not_make_a_long_message() -> None:
    with pytest.raises(CorruptionError) as caught:
        read_document(Part, {"num": "9" * 100_000}, "w.json")
    assert len(str(caught.value)) < 200


def test_the_help_of_the_launcher_does_not_wait_for_pydantic() -> None:
    code = (
        "import sys; from persia.launcher import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit: sys.exit('pydantic' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, b"")
