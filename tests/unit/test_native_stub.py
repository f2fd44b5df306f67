"""The stub of the native module says what the module has: names, parameters, their kinds and defaults."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import persia._native

STUB = ast.parse(Path(persia._native.__file__).with_name("_core.pyi").read_text(encoding="utf-8"))
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
NO_DEFAULT = object()


@pytest.fixture(scope="module")
def core() -> ModuleType:
    return importlib.import_module("persia._core")


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


def methods(class_node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in class_node.body if isinstance(n, ast.FunctionDef) and not is_property(n)}


def attributes(class_node: ast.ClassDef) -> set[str]:
    """Properties and annotated names."""
    names = {n.name for n in class_node.body if isinstance(n, ast.FunctionDef) and is_property(n)}
    names |= {
        n.target.id
        for n in class_node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    return names


def parameters(node: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """(name, kind, default) of each parameter but self."""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(positional) - len(node.args.defaults)) + list(node.args.defaults)
    pairs = [(a, "positional", d) for a, d in zip(positional, defaults, strict=True)]
    pairs += [(a, "keyword", d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return [
        (arg.arg, kind, NO_DEFAULT if default is None else ast.literal_eval(default))
        for arg, kind, default in pairs
        if arg.arg != "self"
    ]


def bound_signature(function: object) -> ast.FunctionDef:
    """pybind11 writes the signature into the first line of the docstring."""
    line = (inspect.getdoc(function) or "").splitlines()[0]
    parsed = ast.parse(f"def {line}: ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return parsed


def test_names(core: ModuleType) -> None:
    public = {name for name in vars(core) if not name.startswith("_")} | {"__version__"}
    variables = {
        n.target.id
        for n in STUB.body
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and ast.unparse(n.annotation) != "TypeAlias"  # of the stub alone
    }
    assert public == set(CLASSES) | set(FUNCTIONS) | variables


def test_native_exports_everything(core: ModuleType) -> None:
    public = {name for name in vars(core) if not name.startswith("_")} | {"__version__"}
    assert all(getattr(persia._native, name) is getattr(core, name) for name in public)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_function(core: ModuleType, name: str) -> None:
    assert parameters(bound_signature(getattr(core, name))) == parameters(FUNCTIONS[name])


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_class_members(core: ModuleType, name: str) -> None:
    cls = getattr(core, name)
    public = {member for member in vars(cls) if not member.startswith("_")}
    declared = attributes(CLASSES[name]) | {m for m in methods(CLASSES[name]) if not m.startswith("_")}
    assert public == declared
    bases = [base.id for base in CLASSES[name].bases if isinstance(base, ast.Name)]
    assert [base.__name__ for base in cls.__bases__ if base.__module__ == core.__name__] == bases


@pytest.mark.parametrize(
    ("cls", "method"),
    [(name, method) for name, node in sorted(CLASSES.items()) for method in sorted(methods(node))],
)
def test_method(core: ModuleType, cls: str, method: str) -> None:
    bound = bound_signature(getattr(getattr(core, cls), method))
    assert parameters(bound) == parameters(methods(CLASSES[cls])[method])


def test_versions_agree() -> None:
    from persia._version import __version__

    assert persia._native.__version__ == __version__
