"""Turns what ORT or the exporter raised into one message that names the cause and the way out.

A forward call explains each error that stops a module from being exported or a graph from being built.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

from ort_zero.compat.frames import is_foreign
from ort_zero.errors import ExportError, OrtZeroError

_CURES = (
    (
        re.compile(
            r"dynamo-optimized function|_gradient_checkpointing_func|CheckpointFunction|torch[./]utils[./]checkpoint"
        ),
        "the module uses torch activation checkpointing, which cannot be exported; switch it off "
        "(model.gradient_checkpointing_disable(), or drop the call of torch.utils.checkpoint), or let ONNX Runtime "
        'compute the blocks again with "ort_zero": {{"memory": {{"checkpointing": "recompute"}}}}',
    ),
    (
        re.compile(r"(?:(?:export of|Exporting the) operator|unrecognized namespace) '?(?P<what>\w[\w:]*(?:\.\w+)*)"),
        "the exporter has no symbolic for the operator {what}",
    ),
    (
        re.compile(r"Could not find an implementation for (?P<what>[\w.]+\(?\d*\)?)"),
        "ONNX Runtime's execution provider has no kernel for the operator {what} with these types",
    ),
    (
        re.compile(r"gradient builder has not been registered: (?P<what>\w+)"),
        "ONNX Runtime has no gradient for the operator {what}",
    ),
    (
        re.compile(r"does not require grad and does not have a grad_fn|computes gradients inside its forward"),
        "the module computes gradients inside its forward (torch.autograd.grad or backward()), which an ONNX graph "
        "cannot contain",
    ),
    (
        re.compile(r"YieldOp is not found"),
        "the module returns no tensor that depends on its weights (tensors inside of generators and functions are not "
        "seen); return a tuple, list, dict or dataclass of tensors",
    ),
    (
        re.compile(r"unsupported memory format option|SparseTensorImpl"),
        "a value inside the module is a sparse tensor, which an ONNX graph cannot hold; compute with dense ones "
        "(.to_dense())",
    ),
    (re.compile(r"does not support input type (?P<what>[^\n]+)"), "an input has a type that ONNX cannot pass: {what}"),
)  # fmt: skip

_WAY_OUT = (
    'Run the model in PyTorch with "ort_zero": {"ortmodule": {"enabled": false}}, or let ort_zero do so by itself '
    'with {"ortmodule": {"fallback": "warn"}}'
)


def explain(error: BaseException, module: Any) -> BaseException:
    """Return the error to raise for `error`, which stopped `module` from being exported or built."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, (OrtZeroError, KeyboardInterrupt, SystemExit)):
            return link
        link = link.__cause__ or link.__context__
    text = str(error)
    cause = next((cure.format(**m.groupdict()) for pattern, cure in _CURES if (m := pattern.search(text))), None)
    if cause is None:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # the last line of a traceback inside the text holds the original exception
        cause = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), None)
        cause = cause or (lines[-1] if lines else type(error).__name__)
        cause = _without_signature(cause).rstrip(". ")
    path, line = _place(error, module)
    path = _node_path(text) or path
    line = _user_line(text) or line
    places = [f"in {path}"] if path else []
    places += [f"at {line}"] if line else []
    where = f" ({', '.join(places)})" if places else ""
    return ExportError(f"{type(module).__name__} cannot run in ONNX Runtime: {cause}{where}. {_WAY_OUT}")


def _without_signature(text: str) -> str:
    """Return what ORT says without its source file, the C++ signature and the code of the error."""
    _, status, said = text.rpartition("[ONNXRuntimeError]")
    if status and (code := re.match(r" : \d+ : \w+ : ", said)):
        text = said[code.end() :]
    begin = re.search(r"\S+\.(?:cc|h|cpp):\d+ ", text)
    if begin is None:
        return text
    _, condition, said = text.partition(" was false. ")
    if condition and said:
        return said
    opened = text.find("(", begin.end())
    depth = 0
    for i in range(opened, len(text) if opened >= 0 else 0):
        depth += (text[i] == "(") - (text[i] == ")")
        # operator() has a second pair
        if depth == 0 and text[i + 1 : i + 2] != "(":
            return text[: begin.start()] + text[i + 1 :].removeprefix(" const").strip() or text
    return text


def _node_path(text: str) -> str:
    """Return the module whose node `text` names, "model.layers.0", or nothing."""
    node = re.search(r"/_original_module/((?:[\w.]+/)+)[\w.]*", text)
    return node[1].strip("/").replace("/", ".") if node else ""


def _user_line(text: str) -> str:
    """Return "FILE:LINE in FUNCTION" for the innermost frame in `text` that is no library's, if any."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    own = [f for f in frames if not is_foreign(f[0])]
    return f"{own[-1][0]}:{own[-1][1]} in {own[-1][2]}" if own else ""


def _place(error: BaseException, module: Any) -> tuple[str, str]:
    """Return the path of the innermost submodule that ran when `error` was raised, and the user's line."""
    names = {id(child): name for name, child in module.named_modules()}
    path = line = ""
    for link in _chain(error):
        inner_path = inner_line = ""
        for frame, number in traceback.walk_tb(link.__traceback__):
            code = frame.f_code
            inner_path = names.get(id(frame.f_locals.get("self"))) or inner_path
            if not is_foreign(code.co_filename):
                inner_line = f"{code.co_filename}:{number} in {code.co_name}"
        path, line = inner_path or path, inner_line or line
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
