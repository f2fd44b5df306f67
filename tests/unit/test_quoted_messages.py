"""Messages that the documentation quotes as symptoms exist, so that a search for one finds its remedy."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = ("parquet.md", "troubleshooting.md")
OF_TORCH = ("result type Float can't be cast to the desired output type Long", "Target size (...) must be")
GAP = "\0"  # a value in a message


@cache
def messages() -> str:
    """All text in the sources of the product, with a gap for each value in it."""
    found: list[str] = []
    for path in (REPOSITORY / "persia").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else GAP
                for part in parts
            ]
            found.append(re.sub(r"%\.?\d*[sdgf]", GAP, "".join(texts)))
    for path in (REPOSITORY / "native" / "src").rglob("*.cc"):
        joined = re.sub(r'"\s*"', "", path.read_text(encoding="utf-8"))
        found += re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
    return "\n".join(found)


def quotations() -> list[tuple[str, str]]:
    """(page, message) of the first cells of tables: code with a space in it."""
    return [
        (page, quoted)
        for page in PAGES
        for cell in re.findall(
            r"^\| (.*?) \|", (REPOSITORY / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE
        )
        for quoted in re.findall(r"`([^`]+)`", cell)
        if " " in quoted and not quoted.startswith(OF_TORCH)
    ]


def fragments(message: str) -> list[str]:
    """The text of a message around its values: quoted words, numbers, names of roles and types, and dots."""
    parts = re.split(r": |\.\.\.|'\w+'|\b\d+\b|\bembedding(?:-\w+)+|\buint64", message)
    return [part.strip(" :?,;()") for part in parts if re.search(r"\w \w", part)]


@pytest.mark.parametrize(("page", "message"), quotations())
def test_quoted_messages_exist(page: str, message: str) -> None:
    wanted = fragments(message)
    assert wanted, f"docs/{page}: {message!r} has no words to look for"
    assert not [part for part in wanted if part not in messages()]


def test_a_message_that_is_gone_is_found() -> None:
    (part,) = fragments("auc is NaN over 5000 samples")[:1]
    assert part not in messages()
