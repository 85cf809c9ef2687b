"""Finds the place in a model where an export, a build or a run failed: the submodule, the operator, the user's line.

:mod:`.runtime.smaller_parts` moves what is found to PyTorch; :mod:`.runtime.error_messages` names it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ort_zero.ortmodule.compat.frames import Frame, users_line
from ort_zero.ortmodule.compat.torch_onnx import TracedPlace

_NODE = re.compile(r"/_original_module((?:/[\w.]+)+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True, slots=True)
class FailurePlace:
    """Where something failed, as far as it is known."""

    path: str = ""
    """Path of the innermost submodule, empty for the model itself or if nothing is known."""
    operator: str = ""
    """ONNX operator whose node failed, ``"ScatterND"``; empty if it is not known."""
    line: str = ""
    """``"FILE:LINE in FUNCTION"`` of the innermost code of the user that led there; empty if it is not known."""


def locate(error: BaseException, module: Any, failed_node: TracedPlace | None = None) -> FailurePlace:
    """Return where `error` was raised.

    Args:
        error: what the exporter or ORT raised.
        module: the user's model.
        failed_node: the traced operator that could not be exported, if that is what failed.
    """
    text = str(error)
    path, line = _running_module(error, module)
    if failed_node is not None:
        return FailurePlace(failed_node.path, "", failed_node.line or line)
    node_path, operator = node_in(text, {name for name, _ in module.named_modules()})
    return FailurePlace(node_path or path, operator, _line_in(text) or line)


def node_in(text: str, paths: Iterable[str]) -> tuple[str, str]:
    """Return the module path and the ONNX operator of the node that ORT's message names; empty if it names none.

    Args:
        text: what ORT says.
        paths: paths of all submodules.
    """
    found = _NODE.search(text)
    if found is None:
        return "", ""
    known, parts = set(paths), found[1].strip("/").split("/")
    for count in range(len(parts), 0, -1):
        path = ".".join(parts[:count])
        if path in known:
            return path, parts[count].partition("_")[0] if count < len(parts) else ""
    # a path of another module tree, or of none: names of operators begin with a capital
    count = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts))
    return ".".join(parts[:count]), parts[count].partition("_")[0] if count < len(parts) else ""


def _line_in(text: str) -> str:
    """Return "FILE:LINE in FUNCTION" for the innermost frame of the user's code in the traceback that `text` holds."""
    return users_line(Frame(file, int(line), function) for file, line, function in _FRAME.findall(text))


def _running_module(error: BaseException, module: Any) -> tuple[str, str]:
    """Return the path of the innermost submodule that ran when `error` was raised, and the user's line."""
    names = {id(child): name for name, child in module.named_modules()}
    path = line = ""
    for link in _chain(error):
        inner_path, frames = "", []
        for frame, number in traceback.walk_tb(link.__traceback__):
            inner_path = names.get(id(frame.f_locals.get("self"))) or inner_path
            frames.append(Frame(frame.f_code.co_filename, number, frame.f_code.co_name))
        path, line = inner_path or path, users_line(frames) or line
    return path, line


def _chain(error: BaseException) -> list[BaseException]:
    """Return `error` and all that led to it; ORT raises its own "from" one that was never raised."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and not any(link is other for other in found):
            found.append(link)
            waiting += [link.__cause__, link.__context__]
    return found
