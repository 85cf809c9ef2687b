"""Names and sentences outside the frozen room say which thing they mean; see "Style" in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "ort_zero").rglob("*.py"))
VAGUE = frozenset(("found", "given", "held", "known", "own"))
"""Parts of names that tell what happened to a thing, and not which thing it is."""
PUBLIC = {("versions.py", "found")}
"""Names that are keys of a command's JSON."""
LONGEST = 30
"""Words from which on a sentence is too long."""
UNCLEAR = re.compile(
    r"\b(what is there|those that|those of|so that it holds|what it has|what they have|that of|the ones?)\b", re.I
)
"""Phrases in the first line of a docstring whose noun the reader has to guess."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring: of the module, classes, functions, and below assignments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text; paragraphs, list items and table rows end one."""
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*|#]|\d+\.) ?|\n(?=\s*\w+: )", text):
        yield from re.split(r"(?<=[.!?:;])[\"')]*\s+", paragraph)


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each function, class, argument, variable and attribute with a vague part."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if name is not None and (VAGUE & set(name.lower().split("_")) or "MOST" in name.split("_")):
            yield node.lineno, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_and_sentences_are_plain(path):
    tree = ast.parse(path.read_text())
    wrong = [f"{line}: name {name!r}" for line, name in vague_names(tree) if (path.name, name) not in PUBLIC]
    for line, text in docstrings(tree):
        wrong += [f"{line}: {len(one.split())} words: {one[:60]!r}" for one in sentences(text)
                  if len(one.split()) >= LONGEST]  # fmt: skip
        first = text.strip().partition("\n\n")[0]
        wrong += [f"{line}: {phrase[0]!r} in {first[:60]!r}" for phrase in UNCLEAR.finditer(first)]
    assert not wrong, f"{path.relative_to(ROOT)}\n" + "\n".join(wrong)


def test_the_checks_see_what_they_should():
    code = '"""Return those of it."""\nMOST_ROWS = 1\n\ndef f(own_part):\n    known = own_part\n    self.held = 1\n'
    assert {name for _, name in vague_names(ast.parse(code))} == {"MOST_ROWS", "own_part", "known", "held"}
    assert [text for _, text in docstrings(ast.parse(code))] == ["Return those of it."]
    assert UNCLEAR.search("Return those of it.") and not UNCLEAR.search("Return the names of the files.")
    assert [len(one.split()) for one in sentences("One two. Three four five:\n\n- six\n- seven eight")] == [2, 3, 2, 2]
