"""Nothing that is loaded may run code: the sources are searched for what would let it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("persia", "k8s", "examples")

# Modules whose readers run what the bytes say.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader"}

# (file, what): the reason.
EXCEPTIONS = {
    ("persia/helper.py", "cloudpickle"): "the user's own functions, through a folder of 0700 that it makes",
    ("persia/storage/dense.py", "pickle"): "only its UnpicklingError, which torch.load raises",
    ("persia/serving/scripts.py", "torch.jit.load"): "it is code: of whom it is run, read_own decides",
    ("persia/serving/triton_model.py", "torch.jit.load"): "in Triton: the file that was exported with it",
}


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def of_call(call: ast.Call, own_loaders: Collection[str]) -> str | None:
    """What is wrong with a call; None: nothing."""
    name = dotted(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in BUILTINS or name in ("builtins.eval", "builtins.exec"):
        return name
    if name in ("torch.load", "torch.jit.load", "torch.export.load", "torch.package.PackageImporter"):
        flag = keywords.get("weights_only")
        is_safe = name == "torch.load" and isinstance(flag, ast.Constant) and flag.value is True
        return None if is_safe else name
    if name.startswith("yaml.") and "load" in name.rpartition(".")[2]:
        loaders = [*call.args[1:2], *([keywords["Loader"]] if "Loader" in keywords else [])]
        is_safe = name in ("yaml.safe_load", "yaml.safe_load_all") or any(
            is_safe_loader(loader) or dotted(loader) in own_loaders for loader in loaders
        )
        return None if is_safe else name
    flag = keywords.get("allow_pickle")
    if flag is not None and not (isinstance(flag, ast.Constant) and flag.value is False):
        return f"{name}(allow_pickle)"
    return None


def is_safe_loader(loader: ast.expr) -> bool:
    return dotted(loader).rpartition(".")[2] in SAFE_LOADERS


def is_own_loader(kind: ast.ClassDef) -> bool:
    """Whether a class is a SafeLoader that only refuses more."""
    return bool(kind.bases) and all(is_safe_loader(base) for base in kind.bases)


def found_in(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of all that could run code, in order."""
    tree = ast.parse(source)
    own_loaders = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and is_own_loader(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from torch import load` would hide a call from the search below.
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = ["" if n in ("torch", "yaml", "builtins") else n for n in names]
            hidden = [n for n in names if n in ("torch.load", "yaml.load", "torch.jit.load", "numpy.load")]
            yield from ((node.lineno, name) for name in hidden)
        elif isinstance(node, ast.Call):
            if (what := of_call(node, own_loaders)) is not None:
                yield node.lineno, what
            continue
        else:
            continue
        yield from ((node.lineno, root) for n in names if (root := n.partition(".")[0]) in MODULES)


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_nothing_that_is_loaded_can_run_code() -> None:
    paths = sources()
    assert len(paths) > 200
    used, wrong = set(), []
    for path in paths:
        file = path.relative_to(ROOT).as_posix()
        for line, what in found_in(path.read_text(encoding="utf-8")):
            if (file, what) in EXCEPTIONS:
                used.add((file, what))
            else:
                wrong.append(f"{file}:{line}: {what}")
    assert not wrong
    assert used == EXCEPTIONS.keys()  # one without a use would hide the next


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, marshal",
        "from shelve import open",
        "def f():\n    from cloudpickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "torch.jit.load(f)",
        "from torch import load",
        "yaml.load(f)",
        "yaml.load(f, Loader=yaml.Loader)",
        "yaml.load(f, yaml.UnsafeLoader)",
        "yaml.unsafe_load(f)",
        "yaml.full_load(f)",
        "class L(yaml.Loader): pass\nyaml.load(f, L)",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_search_finds(code: str) -> None:
    assert list(found_in(code))


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(f, weights_only=True)",
        "yaml.safe_load(f)",
        "yaml.load(f, Loader=yaml.SafeLoader)",
        "class L(yaml.SafeLoader): pass\nyaml.load(f, L)",
        "model.eval()",
        "re.compile(p)",
        "json.loads(t)",
        "np.load(f, allow_pickle=False)",
    ],
)
def test_the_search_lets_pass(code: str) -> None:
    assert not list(found_in(code))
