"""Code blocks of the Markdown pages, and the checks of those that cannot run here.

A comment of its own line before a block says how it is tested; without one, it runs.

    <!-- test: apart -->              runs, and later blocks do not see the names that it assigns
    <!-- test: background -->         a server, which runs until the page ends
    <!-- test: not run, REASON -->    is only checked, by `check`
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import yaml
from persia_k8s.job import JobSpec
from persia_k8s.schema import parse

from persia.config import GlobalConfig, SlotsConfig, parse_embedding_config, parse_global_config
from persia.data.feature_spec import FeatureSpec
from persia.launcher import cli

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
MARK = re.compile(r"<!-- test: (apart|background|not run, \S.*) -->")
PROGRAMS = {"persia-launcher": cli}
# What a path of the repository begins with: such a path in a command must exist.
FOLDERS = ("benchmarks", "docs", "examples", "k8s", "monitoring", "native", "persia", "tests")
INSTALLERS = {"apt-get", "pip"}
SERVERS_OF_A_JOB = {"embeddingParameterServer": {"replicas": 1}, "embeddingWorker": {"replicas": 1}}
KUBERNETES = "1.29"  # whose schemas objects in the pages must meet
SEPARATORS = {"&&", "||", "|", ";", ">", ">>", "&"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of its first line of code
    language: str
    text: str
    mark: str  # "" where it runs like every other

    @property
    def place(self) -> str:
        return f"docs/{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it runs. A block that only installs packages does not, and needs no mark."""
        installs = self.language == "sh" and all(words[0] in INSTALLERS for words in commands(self.text))
        return not installs and not self.mark.startswith("not run, ")


def pages(*sections: str) -> list[str]:
    """The pages of these sections of the site, in its order."""
    navigation = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = {title: entries for section in navigation for title, entries in section.items()}
    return [page for section in sections for page in _pages_of(listed[section])]


def _pages_of(entry: Any) -> Iterator[str]:
    """A page, a titled page or section, or a list of them."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from _pages_of(part)


def blocks(page: str) -> Iterator[Block]:
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    fence = language = mark = ""
    start = 0
    for number, line in enumerate(lines, start=1):
        stripped = line.strip()
        if fence:
            if stripped == fence:
                text = textwrap.dedent("\n".join(lines[start : number - 1])) + "\n"
                yield Block(page, start + 1, language, text, mark)
                fence = mark = ""
        elif opening := re.match(r"(`{3,}|~{3,})\s*(\w*)", stripped):
            fence, language, start = opening[1], opening[2], number
        elif stripped.startswith("<!-- test:"):
            found = MARK.fullmatch(stripped)
            assert found, f"docs/{page}:{number}: {stripped} is no mark of a block"
            mark = found[1]
        else:
            assert not stripped or not mark, f"docs/{page}:{number}: a code block must follow the mark"
    assert not fence, f"docs/{page}: a code block has no end"
    assert not mark, f"docs/{page}: a mark has no code block"


def check(block: Block) -> None:
    """Checks a block that does not run. An error says what is wrong with it."""
    for test in re.findall(r"tests/[\w/]+\.py", block.mark):
        assert (REPOSITORY / test).is_file(), f"{block.place}: there is no {test}"
    checks: dict[str, Callable[[Block], None]] = {
        "python": lambda block: exec_code(block, None),
        "sh": _check_shell,
        "yaml": lambda block: [*yaml.safe_load_all(block.text)] and None,
        "text": lambda block: None,
    }
    assert block.language in checks, f"{block.place}: name the language, one of {', '.join(checks)}"
    checks[block.language](block)


def check_config(block: Block) -> None:
    """A YAML block is a configuration file, a feature spec, a part of a PersiaJob or of a pod, an object of
    Kubernetes, or is marked.
    """
    settings = yaml.safe_load(block.text)
    job = settings.get("spec", settings)
    if settings.keys() <= SlotsConfig.model_fields.keys():
        parse_embedding_config(settings)
    elif settings.keys() <= GlobalConfig.model_fields.keys():
        parse_global_config(settings)
    elif "feature_spec" in settings:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "feature_spec.yaml")
            file.write_text(block.text, encoding="utf-8")
            FeatureSpec.load(file)
    elif job.keys() <= {field.alias for field in JobSpec.model_fields.values()}:
        parse(JobSpec, SERVERS_OF_A_JOB | job, "spec")
    elif settings.keys() <= {"readinessProbe", "livenessProbe"}:
        container = {"name": "one", "image": "one"} | settings
        meta = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}}
        kubernetes_validate.validate(meta | {"spec": {"containers": [container]}}, KUBERNETES, strict=True)
    elif {"apiVersion", "kind"} <= settings.keys():
        kubernetes_validate.validate(settings, KUBERNETES, strict=True)
    else:
        raise AssertionError(f"{[*settings]} is of no known kind: mark the block as not run, with a reason")


def exec_code(block: Block, names: dict[str, Any] | None, source: str | None = None) -> None:
    """Runs a Python block, or only compiles it; a traceback leads to its lines of the page."""
    padding = "\n" * (block.line - 1)
    code = compile(padding + (source or block.text), str(DOCS / block.page), "exec", dont_inherit=True)
    if names is not None:
        exec(code, names)


def commands(text: str) -> Iterator[list[str]]:
    """The commands of shell text, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word not in SEPARATORS:
                command.append(word)
            elif command:
                yield command
                command = []


def _check_shell(block: Block) -> None:
    for words in commands(block.text):
        if words[0] in PROGRAMS:
            accept(PROGRAMS[words[0]], words[1:])
        if words[0] == "./run":
            assert f"\n  {words[1]} " in (REPOSITORY / "run").read_text(encoding="utf-8"), words
        if words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words
        for word in words[1:]:
            if "/" in word and word.partition("/")[0] in FOLDERS:
                assert (REPOSITORY / word).exists(), f"{word} is no file of the repository"


def accept(command: click.Command, arguments: Sequence[str], parent: click.Context | None = None) -> None:
    """Raises where a command does not know an option, or needs one that is missing. Files need not exist."""
    context = click.Context(command, parent, command.name, **command.context_settings)
    values, rest, _ = command.make_parser(context).parse_args(list(arguments))
    for parameter in command.params:
        value = values.get(parameter.name or "")
        if not isinstance(parameter.type, click.Path | click.File) and isinstance(value, str):
            parameter.type.convert(value, parameter, context)
        if parameter.required and not value and not parameter.envvar:
            raise click.MissingParameter(ctx=context, param=parameter)
    if isinstance(command, click.Group):
        _, subcommand, rest = command.resolve_command(context, rest)
        assert subcommand is not None
        accept(subcommand, rest, context)
    elif set(rest) - {"..."}:  # which stands for more options
        raise click.UsageError(f"unexpected {' '.join(rest)}", context)
