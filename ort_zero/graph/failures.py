"""Turns what ORT or the exporter raised into one message that names the cause and the way out."""

from __future__ import annotations

import re
from typing import Any

from ort_zero.errors import ExportError, OrtZeroError

_CURES = (
    (
        re.compile(
            r"dynamo-optimized function|_gradient_checkpointing_func|CheckpointFunction|torch[./]utils[./]checkpoint"
        ),
        "the module uses torch activation checkpointing, which cannot be exported; switch it off "
        "(model.gradient_checkpointing_disable(), or drop the call of torch.utils.checkpoint)",
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
    where = _user_line(text)
    return ExportError(f"{type(module).__name__} cannot run in ONNX Runtime: {cause}{where}. {_WAY_OUT}")


def _user_line(text: str) -> str:
    """Return " (at FILE:LINE in FUNCTION)" for the innermost frame that is neither torch's nor ORT's, if any."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    own = [f for f in frames if not re.search(r"[/\\](torch|onnxruntime|onnx|ort_zero)[/\\]", f[0])]
    return f" (at {own[-1][0]}:{own[-1][1]} in {own[-1][2]})" if own else ""
