"""MkDocs hooks: the page of the command line, and files of the repository as part of the site.

Files that pages link to, such as examples, become pages.
Pages link to them relative to their place in the repository, so that links work there too. In the site such a
file is below source/, and the links are rewritten. A code file becomes a page that shows its text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

from persia.launcher import cli

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"<!-- test: .* -->\n\n?")  # how a code block is tested
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the linked files, and those that Markdown files among them link to."""
    waiting = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while waiting:
        uri, text = waiting.pop()
        for target in LINK.findall(text):
            linked = _place(uri, target).partition("#")[0]
            path = ROOT / linked.removeprefix("source/").removesuffix(".page.md")
            if not linked.startswith("source/") or not path.exists() or files.get_file_from_path(linked):
                continue
            if linked.endswith(".page.md"):
                files.append(File.generated(config, linked, content=_shown(path)))
            elif linked.endswith(".md"):
                content = path.read_text(encoding="utf-8")
                waiting.append((linked, content))
                files.append(File.generated(config, linked, content=content))
            else:
                files.append(File.generated(config, linked, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites links to repository files, removes marks of tests, and fills the page of the command line."""
    markdown = MARK.sub("", markdown)
    if page.file.src_uri == "reference/cli.md":
        return "\n\n".join([markdown, *_helps(cli, "persia-launcher", None)])
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        linked = _place(page.file.src_uri, match[1])
        is_source = linked.startswith("source/") or page.file.src_uri.startswith("source/")
        changes = is_source or linked.startswith("adr/index.md")
        return posixpath.relpath(linked, folder or ".") if changes else match[1]

    if page.file.src_uri.endswith(".page.md"):
        return markdown
    return LINK.sub(rewrite, markdown)


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    """The help of a command and of its subcommands, as a terminal shows it."""
    context = click.Context(command, parent, name, terminal_width=80, **command.context_settings)
    depth = context.command_path.count(" ")
    yield f"{'#' * (depth + 2)} {context.command_path}\n\n```text\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for subcommand in command.list_commands(context):
            yield from _helps(command.get_command(context, subcommand), subcommand, context)


def _place(uri: str, target: str) -> str:
    """The URI in the site of what `target` means in the page with this URI."""
    own = uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"
    target, hash_sign, anchor = target.partition("#")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
    if place == "docs/adr":
        place = "docs/adr/index.md"
    if place.startswith("docs/"):
        return place.removeprefix("docs/") + hash_sign + anchor
    if (ROOT / place / "README.md").exists():
        place = f"{place}/README.md"
    is_text = not place.endswith((".md", ".png", ".svg"))
    return (f"source/{place}.page.md" if is_text else f"source/{place}") + hash_sign + anchor


def _shown(path: Path) -> str:
    """A page with the text of a file, or the names in a folder."""
    language = {".py": "python", ".yml": "yaml", ".proto": "protobuf"}.get(path.suffix, "text")
    if path.is_dir():
        text = "\n".join(sorted(entry.name for entry in path.iterdir()))
    else:
        text = path.read_text(encoding="utf-8", errors="replace").rstrip()
    return f"# {path.name}\n\n````{language}\n{text}\n````\n"
