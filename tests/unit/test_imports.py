"""Imports go one way, stay light, and private names of other packages stay in compat/."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ort_zero"
FILES = sorted(PACKAGE.rglob("*.py"))
FOREIGN = {"torch", "deepspeed", "onnxruntime"}
SPLIT = {"runtime": {"guards", "export", "operators", "zero3", "export_cache", "built_graph"},
         "statistics": {"collect", "compare"}}  # fmt: skip
"""Packages in which a module or a package below stands for itself; the package's own name means the rest of it."""
ALLOWED: dict[str, set[str]] = {
    # what needs nothing of the rest
    "errors": set(),
    "env": set(),
    "utils": {"errors"},
    "log": {"env", "errors"},
    "config": {"errors", "log"},
    # versions of other packages; ranks; ONNX
    "compat": {"env", "errors", "log", "utils"},
    "distributed": {"compat", "env", "errors"},
    "onnx_edit": set(),
    # ZeRO-3 in PyTorch, and in a graph of ONNX Runtime
    "zero3_hooks": {"compat", "utils"},
    "runtime.zero3": {"compat", "errors", "onnx_edit", "utils"},
    # what users collect, and how two runs are compared
    "statistics": {"env", "errors", "log", "utils"},
    "statistics.collect": {"compat", "distributed", "env", "errors", "log", "onnx_edit", "runtime.zero3", "statistics",
                           "utils", "zero3_hooks"},
    "statistics.compare": {"errors", "statistics", "utils"},
    "recompute": {"compat", "config", "env", "errors", "log", "runtime.zero3", "utils"},
    "checkpoint": {"compat", "distributed", "errors", "log", "utils"},
    # a model in ONNX Runtime: each package is a stage, the modules of `runtime` itself put them together
    "runtime.export": {"compat", "env", "errors", "statistics.collect", "zero3_hooks"},
    "runtime.operators": {"compat", "runtime.export"},
    "runtime.guards": {"compat", "runtime.export", "utils"},
    "runtime.built_graph": {"compat", "recompute", "runtime.export", "runtime.guards", "runtime.zero3",
                            "statistics.collect"},
    "runtime.export_cache": {"compat", "env", "errors", "log", "runtime.built_graph", "runtime.export",
                             "runtime.guards", "runtime.operators", "utils"},
    "runtime": {"compat", "config", "distributed", "env", "errors", "log", "recompute", "runtime.built_graph",
                "runtime.export", "runtime.export_cache", "runtime.guards", "runtime.operators", "runtime.zero3",
                "statistics.collect", "zero3_hooks"},
    # what connects all this to DeepSpeed and to users
    "plugin": {"checkpoint", "compat", "config", "distributed", "env", "errors", "log", "recompute", "runtime",
               "runtime.operators", "runtime.zero3", "statistics.collect", "utils", "zero3_hooks"},
    "doctor": {"compat", "env", "errors"},
    "__init__": {"plugin"},
    "graph": {"runtime.operators"},
    "hooks": {"statistics.collect", "statistics.compare", "zero3_hooks"},
    "cli": {"__init__", "checkpoint", "compat", "distributed", "doctor", "env", "errors", "recompute", "statistics",
            "statistics.compare", "utils"},
    "__main__": {"cli"},
    "testing": {"compat", "distributed", "errors", "plugin", "recompute", "runtime"},
}  # fmt: skip
"""What each package may import, at module level or later. No way leads back, and every entry is in use."""


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


def module_of(path: Path) -> str:
    parts = parts_of(path)
    return ".".join(("ort_zero", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_of(path): path for path in FILES}


def package_of(module: str) -> str:
    """Return the key of ALLOWED that `module` belongs to."""
    first, *rest = [*module.split(".")[1:], ""]
    return f"{first}.{rest[0]}" if rest and rest[0] in SPLIT.get(first, ()) else first or "__init__"


def imported_modules(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import of our own modules, including those by a name in a string."""
    inside = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = inside[: len(inside) - node.level + 1] if node.level else []
            base = ".".join(start + (node.module.split(".") if node.module else []))
            below = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else base for name in below]
        elif isinstance(node, ast.Constant) and node.value in MODULES and node.value != "ort_zero":
            names = [node.value]
        else:
            continue
        for name in dict.fromkeys(names):
            if name in MODULES and name != module:
                yield node.lineno, name


@functools.cache
def graph_of_imports() -> dict[str, list[tuple[int, str]]]:
    return {
        module: list(imported_modules(ast.parse(path.read_text()), module, path.name == "__init__.py"))
        for module, path in MODULES.items()
    }


def cycle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the nodes of one cycle in order, nothing if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


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


def test_imports_are_allowed():
    wrong = [
        f"{MODULES[module].relative_to(PACKAGE.parent)}:{line} imports {name}, and {package_of(module)} may not import "
        f"{package_of(name)}"
        for module, found in graph_of_imports().items()
        for line, name in found
        if package_of(name) not in {package_of(module), *ALLOWED.get(package_of(module), ())}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_allowed_import_is_in_use():
    used = {(package_of(module), package_of(name)) for module, found in graph_of_imports().items() for _, name in found}
    idle = [f"{package} -> {other}" for package, others in ALLOWED.items() for other in others
            if (package, other) not in used]  # fmt: skip
    assert not idle, f"take out of ALLOWED what nobody imports: {', '.join(sorted(idle))}"
    assert set(ALLOWED) == {package_of(module) for module in MODULES}


def test_imports_have_no_cycle():
    assert cycle_in(ALLOWED) == []
    assert cycle_in({module: [name for _, name in found] for module, found in graph_of_imports().items()}) == []


@pytest.mark.parametrize("path", [p for p in FILES if parts_of(p)[0] != "compat"], ids=lambda p: "/".join(parts_of(p)))
def test_only_compat_names_private_symbols(path):
    wrong = [f"{path.name}:{line} {name}" for line, name in private_uses(ast.parse(path.read_text()))]
    assert not wrong


def test_the_walk_finds_what_it_should():
    code = "import torch\nfrom onnxruntime.training import _utils\nimport deepspeed._x as d\ntorch._C.f()\nd.ok\n"
    assert sorted(line for line, _ in private_uses(ast.parse(code))) == [2, 3, 4]
    code = (
        "from ort_zero import env, enable\nimport ort_zero.cli.main\nfrom . import patches\n"
        "from ..runtime.guards import keys\nHOMES = {'x': 'ort_zero.statistics.rows'}\n"
    )
    found = [name for _, name in imported_modules(ast.parse(code), "ort_zero.zero3_hooks.subscriber")]
    assert set(found) == {
        "ort_zero.env", "ort_zero", "ort_zero.cli.main", "ort_zero.zero3_hooks.patches", "ort_zero.runtime.guards.keys",
        "ort_zero.statistics.rows",
    }  # fmt: skip
    assert [package_of(name) for name in ("ort_zero", "ort_zero.runtime.guards.keys", "ort_zero.runtime.runtime")] == [
        "__init__", "runtime.guards", "runtime",
    ]  # fmt: skip
    assert cycle_in({"a": ["b"], "b": ["c"], "c": []}) == []
    assert set(cycle_in({"a": ["b"], "b": ["c"], "c": ["a"]})) == {"a", "b", "c"}


@pytest.mark.parametrize("module", ["ort_zero", "ort_zero.plugin", "ort_zero.cli.main", "ort_zero.compat.extensions"])
def test_import_is_light(module):
    code = (
        f"import sys, {module}\n"
        "print(*sorted({'torch', 'deepspeed', 'onnxruntime', 'onnx', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
