"""Tells from their sources which test modules need no torch, so that nobody has to list them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = frozenset(("torch", "deepspeed", "onnxruntime", "transformers"))
"""Packages whose import takes seconds."""


def needs_torch(path: Path) -> bool:
    """Return whether importing the module at `path` imports torch, or a package that does so.

    Follows the imports at module level through the project's own modules; what a function imports is not counted.
    """
    return bool(heavy_imports(path.resolve()))


@functools.cache
def heavy_imports(path: Path) -> frozenset[str]:
    """Return which of the packages :data:`HEAVY` importing the module at `path` imports."""
    seen, waiting = {path}, [path]
    heavy: set[str] = set()
    while waiting:
        module = waiting.pop()
        for name in _imported(module):
            if name in HEAVY:
                heavy.add(name)
            file = _file_of(name, module.parent)
            if file is not None and file not in seen:
                seen.add(file)
                waiting.append(file)
    return frozenset(heavy)


@functools.cache
def _imported(path: Path) -> frozenset[str]:
    """Return every module that the one at `path` may import when it is imported, and the packages around them."""
    found = set()
    for node in _at_module_level(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return frozenset(found)


def _at_module_level(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If):
            waiting += node.orelse
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                waiting += node.body
        elif isinstance(node, (ast.Try, ast.With)):
            waiting += node.body


def _file_of(name: str, beside: Path) -> Path | None:
    """Return the file of a module of this project, its examples or its tests; None for everything installed."""
    for root in (ROOT, ROOT / "examples", beside):
        stem = root.joinpath(*name.split("."))
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                return file
    return None
