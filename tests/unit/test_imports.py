"""Imports go one way, stay light, and private names of other packages stay in compat/."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ort_zero"
FILES = sorted(PACKAGE.rglob("*.py"))
FOREIGN = {"torch", "deepspeed", "onnxruntime"}
LAYERS = (
    {"config", "errors", "env", "log", "utils"},
    {"distributed", "compat", "onnx_edit"},
    {"runtime", "zero3_hooks", "checkpoint", "statistics", "recompute"},
    {"plugin", "doctor", "__init__", "graph", "hooks"},
    {"cli", "testing", "__main__"},
)


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


def layer(name: str) -> int:
    for number, names in enumerate(LAYERS):
        if name in names:
            return number
    raise AssertionError(f"ort_zero.{name} is in no layer; add it to LAYERS")


def own_imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield (line, first part below ort_zero) of each import of our own package, "__init__" for the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head, *rest = alias.name.split(".")
                if head == "ort_zero":
                    yield node.lineno, rest[0] if rest else "__init__"
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            names = base + (node.module.split(".") if node.module else [])
            if names[:1] != ["ort_zero"]:
                continue
            if len(names) > 1:
                yield node.lineno, names[1]
            else:
                for alias in node.names:
                    is_module = (PACKAGE / alias.name).is_dir() or (PACKAGE / f"{alias.name}.py").is_file()
                    yield node.lineno, alias.name if is_module else "__init__"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each private name of a foreign package, as far as the syntax tells."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.split(".")[0]
                if head in FOREIGN:
                    bound.add(alias.asname or head)
                    if any(map(is_private, alias.name.split("."))):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in FOREIGN:
            for alias in node.names:
                bound.add(alias.asname or alias.name)
                if any(map(is_private, [*node.module.split("."), alias.name])):
                    yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(parts_of(p)))
def test_imports_go_one_way(path):
    parts = parts_of(path)
    mine = layer(parts[0])
    tree = ast.parse(path.read_text())
    wrong = [
        f"{path.name}:{line} imports ort_zero.{name}"
        for line, name in own_imports(tree, ("ort_zero", *parts[:-1]))
        if layer(name) > mine
    ]
    assert not wrong


@pytest.mark.parametrize("path", [p for p in FILES if parts_of(p)[0] != "compat"], ids=lambda p: "/".join(parts_of(p)))
def test_only_compat_names_private_symbols(path):
    wrong = [f"{path.name}:{line} {name}" for line, name in private_uses(ast.parse(path.read_text()))]
    assert not wrong


def test_the_walk_finds_what_it_should():
    code = "import torch\nfrom onnxruntime.training import _utils\nimport deepspeed._x as d\ntorch._C.f()\nd.ok\n"
    assert sorted(line for line, _ in private_uses(ast.parse(code))) == [2, 3, 4]
    code = "from ort_zero import env, enable\nimport ort_zero.cli.main\nfrom . import x\nfrom ..graph import y\n"
    found = list(own_imports(ast.parse(code), ("ort_zero", "bridge")))
    assert [name for _, name in found] == ["env", "__init__", "cli", "bridge", "graph"]


@pytest.mark.parametrize("module", ["ort_zero", "ort_zero.plugin", "ort_zero.cli.main", "ort_zero.compat.extensions"])
def test_import_is_light(module):
    code = (
        f"import sys, {module}\n"
        "print(*sorted({'torch', 'deepspeed', 'onnxruntime', 'onnx', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
