"""Checks the Markdown pages against the writing rules, and says for each line what to do.

    python docs/lint_prose.py [PAGE ...]

Without pages: README.md and all of docs/. The rules: lines of at most 120 characters, except tables and long
links; sentences of at most 18 words on average in a page, and of at most 40 each; one term for one thing, see
docs/glossary.md; headings that name a subject. Code is not prose.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WIDTH, MAX_MEAN_WORDS, MAX_WORDS = 120, 18.0, 40

# Pattern to what to write instead; matched without regard to case.
REPLACED = {
    r"\b(?:a|an|the|this|each|its|one|whose|of|with|over|these) pools?\b|\bpools of\b": "tier file or slab",
    r"\bannounc\w*": "advertise (a service), submit (a batch) or prefetch hint",
    r"\b(?:the|its|a|each|whose) cut\b": "snapshot point",
    r"\brows? (?:\w+ )?(?:go|goes|leave|leaves|come|comes|lie|lies|rest)\b": "who inserts or evicts them",
    r"\b(?:never )?rests\b": "throttled",
    r"\brounding by chance\b": "stochastic rounding",
    r"\bthe manifest makes\b": "commit, commit record",
    r"\bdim zero\b": "cold row",
    r"\bgradient returner\b": "gradient sender",
    r"\bupdate memory\b": "update deduplicator",
    r"\blater lookup\b": "deferred lookup",
    r"\b(?:said|says|say) (?:hello|bye)\b": "joined, left",
    r"\bwhoever\b": "the person or process, by name",
    r"\bof which\b": "a second sentence",
    r"\bthat of those\b": "the noun again",
    r"\bgo(?:es)? on\b": "continue",
    r"\bwhat is (?:not )?there\b": "the subject, by name",
    r"\bgiven up\b": "released (a batch), cancelled",
    r"(?<![\w/])[a-z_]+\.md\b": "the title of the page",
}
# Headings that are questions, clauses or riddles; any other with a finite verb of this list.
RIDDLE = re.compile(
    r"^(?:what|who|where|when|why|how (?:fast|long|much|many|late)|or|nothing|that)\b", re.IGNORECASE
)
VERB = re.compile(
    r"\b(?:is|are|was|were|does|do|has|have|had|goes|costs|makes|tells?|says?|ends|follows|gains)\b"
)

CODE = re.compile(r"`+[^`]*`+")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"(?<![Ee]\.g\.)(?<!i\.e\.)(?<!vs\.)(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9#\[])")

NEW_BLOCK = re.compile(r"\s*(?:[-*]|\d+\.) |[#|]|!!!|:::|<!--|    \S")

Finding = tuple[int, str]


def plain(text: str) -> str:
    """The words of a paragraph: inline code as one word, links as their text."""
    text = LINK.sub(r"\1", CODE.sub("Code", text))
    return re.sub(r"\*\*|<[^>]+>", "", text)


def paragraphs(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yields (line number, "prose", "cell" or "heading", text); list items are paragraphs of their own."""
    is_code, start, gathered = False, 0, list[str]()
    for number, line in enumerate([*lines, ""], start=1):
        stripped = line.strip()
        is_fence = stripped.startswith(("```", "~~~"))
        ends = (
            is_code
            or is_fence
            or not stripped
            or re.match(r"\s*(?:[-*]|\d+\.) |[#|]|!!!|:::|<!--|    \S", line)
        )
        if gathered and ends:
            yield start, "prose", " ".join(gathered)
            gathered = []
        if is_fence:
            is_code = not is_code
        elif is_code or not stripped or stripped.startswith(("<!--", "!!!", ":::")):
            continue
        elif stripped.startswith("#"):
            yield number, "heading", stripped.lstrip("# ")
        elif stripped.startswith("|"):
            for cell in CODE.sub("Code", stripped).strip("|").split("|"):
                yield number, "cell", cell.strip()
        elif not line.startswith("    ") or re.match(r"\s*(?:[-*]|\d+\.) ", line):
            start = start if gathered else number
            gathered.append(re.sub(r"^(?:[-*]|\d+\.) ", "", stripped))
        elif gathered:
            gathered.append(stripped)


def findings(page: str, text: str) -> Iterator[Finding]:
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        longest = max(
            (len(word) for word in CODE.sub(lambda code: code.group().replace(" ", "_"), line).split()),
            default=0,
        )
        if len(line) > MAX_WIDTH and not line.lstrip().startswith("|") and longest < MAX_WIDTH - 20:
            yield number, f"{len(line)} characters: wrap at {MAX_WIDTH}"
    lengths = []
    for number, kind, raw in paragraphs(lines):
        words = plain(raw)
        if kind == "heading":
            if words.endswith((".", "?", "!", ":")) or RIDDLE.match(words) or VERB.search(words):
                yield number, f"heading {raw!r}: name the subject, as in 'Limitations'"
            continue
        for pattern, instead in REPLACED.items():
            if found := re.search(pattern, words, re.IGNORECASE):
                yield number, f"{found.group()!r}: write {instead} (docs/glossary.md)"
        for sentence in SENTENCE_END.split(words):
            length = len(re.findall(r"\w[\w'.,:/-]*", sentence))
            if length > MAX_WORDS:
                yield number, f"{length} words: split the sentence that begins {sentence[:40]!r}"
            if kind == "prose" and length:
                lengths.append(length)
    if lengths and (mean := sum(lengths) / len(lengths)) > MAX_MEAN_WORDS:
        yield 1, f"{mean:.1f} words a sentence on average: shorten to {MAX_MEAN_WORDS:g}"


def main(arguments: list[str]) -> int:
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    count = 0
    for path in [Path(argument).resolve() for argument in arguments] or every:
        page = path.relative_to(ROOT).as_posix()
        for number, message in findings(page, path.read_text(encoding="utf-8")):
            print(f"{page}:{number}: {message}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
