"""Runs the snippets of the pages about persia.nn, page by page, in their order and in one namespace."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[3] / "docs"
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEAST = {"embedding_bags.md": 8, "convert_and_export.md": 5, "torchrec.md": 2}  # snippets


@pytest.mark.parametrize("page", list(LEAST))
def test_the_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    snippets = list(SNIPPET.finditer(text))
    assert len(snippets) == text.count("```python\n") >= LEAST[page]
    has_torchrec = importlib.util.find_spec("torchrec") is not None
    torch.manual_seed(0)
    namespace: dict[str, Any] = {}
    for found in snippets:
        source = found.group(1)
        needs_torchrec = "import KeyedJaggedTensor" in source
        if needs_torchrec and not has_torchrec:
            continue
        # Its own lines of the page, so that a traceback leads there.
        code = compile("\n" * text[: found.start(1)].count("\n") + source, str(DOCS / page), "exec")
        with warnings.catch_warnings():
            if needs_torchrec or "torch.jit" in source:
                warnings.simplefilter("ignore")  # those of its import, or of what torch deprecates
            exec(code, namespace)
