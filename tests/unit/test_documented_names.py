"""Every public name has a docstring with its arguments, and a place in the Reference pages of the site."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from persia.validation import Section

DOCS = Path(__file__).parents[2] / "docs"
MODULES = (
    "persia",
    *("persia.config", "persia.ctx", "persia.data", "persia.distributed", "persia.embedding"),
    *("persia.embedding.data", "persia.embedding.initializers", "persia.embedding.lr_schedule"),
    *("persia.embedding.optim", "persia.env", "persia.errors", "persia.helper", "persia.models", "persia.nn"),
    *("persia.observability", "persia.pmem", "persia.service", "persia.serving", "persia.testing"),
    *("persia.train", "persia.utils"),
)
# Names for readers of the published documentation, which docs/published_system.md has.
UNLISTED = {"persia.logger", "persia.prelude"}


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    for name in getattr(module, "__all__", own):
        if not name.startswith("_"):
            yield f"{module.__name__}.{name}", getattr(module, name)


def referenced() -> list[Any]:
    """The objects of the Reference pages; of a module, all its names."""
    found: list[Any] = []
    for page in (DOCS / "reference").glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, name = path.rpartition(".")
            try:
                value = importlib.import_module(path)
            except ModuleNotFoundError:
                value = getattr(importlib.import_module(module), name)
            found.append(value)
            if inspect.ismodule(value):
                found += [member for _, member in public_names(value)]
    return found


def documented(value: Any) -> str:
    """The docstring of a class, with those of the classes that its arguments come from, or of a function."""
    if not inspect.isclass(value):
        return value.__doc__ or ""
    if not value.__dict__.get("__doc__"):
        return ""
    return "\n".join(
        text
        for base in value.__mro__
        if base is not object
        for text in (base.__doc__, base.__init__.__doc__)
        if text
    )


def missing_arguments(value: Any) -> list[str]:
    """Not of data classes and models: their fields say it, and docs/configuration.md lists the keys."""
    if dataclasses.is_dataclass(value) or (
        inspect.isclass(value) and issubclass(value, (Enum, Section, tuple))
    ):
        return []
    if inspect.isclass(value) and issubclass(value, Exception):
        return []  # takes its message
    words = set(re.findall(r"\w+", documented(value))) | {"self", "args", "kwargs"}
    return [
        name for name in inspect.signature(value).parameters if not name.startswith("_") and name not in words
    ]


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_docstrings_with_their_arguments(module: str) -> None:
    wrong = {}
    for name, value in public_names(importlib.import_module(module)):
        if not callable(value) or inspect.ismodule(value):
            continue
        wrong[name] = missing_arguments(value) if documented(value) else ["a docstring"]
        if re.search(r"^ *Example:$", documented(value), re.MULTILINE):
            wrong[name].append("Examples: in place of Example:, for its code to be shown as code")
        if inspect.isclass(value):
            for attribute in vars(value):
                member = inspect.getattr_static(value, attribute)
                member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                if inspect.isfunction(member) and not attribute.startswith("_"):
                    wrong[f"{name}.{attribute}"] = (
                        [] if inspect.getdoc(getattr(value, attribute)) else ["a docstring"]
                    )
    assert not {name: words for name, words in wrong.items() if words}


def test_public_names_are_in_the_reference() -> None:
    found = referenced()
    for module in MODULES:
        for name, value in public_names(importlib.import_module(module)):
            if name not in UNLISTED and callable(value):
                assert any(value is other for other in found), f"{name} is in no page of docs/reference"
