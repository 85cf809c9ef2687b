"""Turns what ORT or the exporter raised into one message that names the cause and the way out.

A forward call explains each error that stops a module from being exported or a graph from being built.
"""

from __future__ import annotations

import re
from typing import Any

from ort_zero.errors import ExportError, OrtZeroError
from ort_zero.ortmodule.compat.torch_onnx import TracedPlace
from ort_zero.ortmodule.runtime.failure_place import locate

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
        re.compile(r"YieldOp is not found|OrtValue indexes should have been populated"),
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


def explain(error: BaseException, module: Any, failed_node: TracedPlace | None = None) -> BaseException:
    """Return the error to raise for `error`, which stopped `module` from being exported or built.

    Args:
        error: what the exporter or ORT raised.
        module: the user's model.
        failed_node: the traced operator that could not be exported, if that is what failed.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, (OrtZeroError, KeyboardInterrupt, SystemExit)):
            return link
        link = link.__cause__ or link.__context__
    cause = cause_of(error)
    place = locate(error, module, failed_node)
    places = [f"in {place.path}"] if place.path else []
    places += [f"at {place.line}"] if place.line else []
    where = f" ({', '.join(places)})" if places else ""
    return ExportError(f"{type(module).__name__} cannot run in ONNX Runtime: {cause}{where}. {_WAY_OUT}")


def cause_of(error: BaseException) -> str:
    """Return what `error` says in one sentence: the cure that is known for it, else the exception that began it."""
    text = str(error)
    cause = next((cure.format(**m.groupdict()) for pattern, cure in _CURES if (m := pattern.search(text))), None)
    if cause is None:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # the last line of a traceback inside the text holds the original exception
        cause = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), None)
        cause = cause or (lines[-1] if lines else type(error).__name__)
        cause = _without_signature(cause).rstrip(". ")
    return cause


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
