"""Write docs/reference.md from the code: the section's models, the commands' parsers, the docstrings of public names.

``python docs/make_reference.py`` needs torch and the packages of the statistics, since public functions are imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from ort_zero import config, env
from ort_zero.cli.main import make_parser

PAGE = Path(__file__).with_name("reference.md")
COMMON = ("--help", "--json", "--quiet", "--debug")
SEVERAL = 3
"""Commands from which on an equal argument of all of them is shown once."""
DOORS = ("ort_zero", "ort_zero.checkpoint", "ort_zero.hooks", "ort_zero.errors")

HEAD = """# Reference

Written by `python docs/make_reference.py` from the code; do not edit.

## The section

Put `"ort_zero"` into the DeepSpeed JSON, into the dict for `deepspeed.initialize`, or into the DeepSpeed config of
Accelerate or HF's Trainer. A dot in a key means a nested object: `"ort_zero": {"checkpoint": {"async_save": true}}`.
An unknown key, a wrong value, or a key of an engine that does not run is an error. It names the key and the way out.
"""

ENVIRONMENT = """
## Environment

| variable | effect |
|---|---|
"""

COMMANDS = """
## Commands

`ort-zero COMMAND`, or `python -m ort_zero COMMAND`. Exit status: 0 = done, or the same; 1 = a difference, a failed
verification, a problem to fix; 2 = bad input or usage. Every command takes `--json` (one JSON object on stdout),
`--quiet` (errors alone), `--debug` (an error's traceback; also `ORT_ZERO_DEBUG=1`) and `--help`. Several commands take
these: all that read checkpoints `--tp-split`, all that start a script `--launcher`.

| argument | effect |
|---|---|
"""

NAMES = """
## Python names

Each name on this page keeps its import path and its arguments; [CHANGELOG.md](../CHANGELOG.md) announces changes. Any
other name may change in any release. The package ships its types (`py.typed`), so mypy and editors check calls.
Public too are the section, the variables, the commands, and the formats of checkpoints and statistics on disk.
"""

ERRORS = """
`ort_zero.checkpoint.zero_to_fp32` has the four public functions of DeepSpeed's module of that name, for checkpoints of
both formats. `python -m ort_zero.hooks.merge_activation_summary` is `ort-zero stats merge`.
"""


def page() -> str:
    """Return the text of docs/reference.md."""
    return HEAD + section() + environment() + commands() + names()


def cell(text: str) -> str:
    """Return a text as one cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def markdown(text: str) -> str:
    """Return a docstring's text with the code marks of markdown."""
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def section() -> str:
    """Return the table of the section's keys."""
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    lines += [f"| `{key}` | {values} | {default} | {effect} |" for key, values, default, effect in keys(config.Config)]
    return "\n" + "\n".join(lines) + "\n"


def keys(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield path, values, default and effect of each key of a model, with the keys of the models in it."""
    texts = field_docstrings(model)
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{above}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        yield above + name, cell(values_of(field.annotation)), f"`{json.dumps(default)}`", cell(markdown(texts[name]))


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a model."""
    body = ast.parse(inspect.getsource(model)).body[0].body
    return {
        field.target.id: text.value.value
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def values_of(annotation: typing.Any) -> str:
    """Return the values that a field takes, in JSON's words."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(values_of(part) for part in typing.get_args(annotation))
    if origin is list:
        return f"list of {values_of(typing.get_args(annotation)[0])}s"
    return {bool: "`true`, `false`", int: "integer", str: "string", type(None): "`null`"}[annotation]


def environment() -> str:
    """Return the table of environment variables, from the docstring of ``ort_zero/env.py``."""
    rows = re.findall(r"^\| ``(\w+)`` \| (?!internal)(.+) \|$", env.__doc__ or "", flags=re.M)
    more = re.findall(r"^(``OMP_NUM_THREADS.*)$", env.__doc__ or "", flags=re.M)
    table = "".join(f"| `{name}` | {markdown(effect)} |\n" for name, effect in rows)
    return ENVIRONMENT + table + "".join(f"\n{markdown(line)}\n" for line in more)


def commands() -> str:
    """Return the table of all commands and their arguments."""
    parsers = list(parsers_of(make_parser()))
    own = {
        parser.prog: [action for action in parser._actions if not set(action.option_strings) & set(COMMON)]
        for parser in parsers
    }
    times = Counter(row(action) for actions in own.values() for action in actions)
    text = COMMANDS + "".join(line for line, number in times.items() if number >= SEVERAL)
    text += "\n| command, argument | effect |\n|---|---|\n"
    for parser in parsers:
        description = (parser.description or "").rstrip(".")
        actions = own[parser.prog]
        text += f"| **`{usage(parser, actions)}`** | **{description}** |\n"
        text += "".join(row(action) for action in actions if times[row(action)] < SEVERAL)
    return text


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers that run a command, below a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                groups = [each for each in sub._actions if isinstance(each, argparse._SubParsersAction)]
                yield from parsers_of(sub) if groups else (sub,)


def usage(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> str:
    """Return the command with its required arguments."""
    words = [parser.prog]
    for action in actions:
        if action.option_strings and action.required:
            words.append(f"{action.option_strings[0]} {value_of(action)}".strip())
    for action in actions:
        if not action.option_strings:
            words.append("[-- ARGUMENTS]" if action.nargs in ("*", argparse.REMAINDER) else value_of(action))
    return " ".join(words)


def value_of(action: argparse.Action) -> str:
    """Return the word that stands for an argument's value, empty for a switch."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return "{" + ",".join(str(choice) for choice in action.choices) + "}"
    return str(action.metavar or action.dest.upper())


def row(action: argparse.Action) -> str:
    """Return the row of an argument."""
    name = f"{', '.join(action.option_strings)} {value_of(action)}".strip()
    return f"| `{cell(name)}` | {cell(action.help or '')} |\n"


def names() -> str:
    """Return the table of the public Python names."""
    text = f"{NAMES}\n| name | |\n|---|---|\n"
    for door in DOORS:
        module = importlib.import_module(door)
        offered = getattr(module, "__all__", None) or [name for name in vars(module) if name.endswith("Error")]
        for name in offered:
            value = getattr(module, name)
            said = "the version" if isinstance(value, str) else first_sentences(inspect.getdoc(value) or "")
            text += f"| `{door}.{name}{arguments(value)}` | {cell(markdown(said))} |\n"
    return text + ERRORS


def first_sentences(text: str) -> str:
    """Return the first paragraph of a docstring."""
    return text.split("\n\n")[0]


def arguments(value: object) -> str:
    """Return the arguments of a function, without types; those that may be left out as ``name=default``."""
    if not inspect.isfunction(value):
        return ""
    shown = []
    for parameter in inspect.signature(value).parameters.values():
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    PAGE.write_text(page())
