"""Call ``torch.compile`` with what its release has, and make its limits of recompilation fit many equal modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as dynamo_config

RECOMPILE_LIMIT = 64
"""Graphs of one function that Dynamo keeps; layers whose attributes differ need one each, and the default is 8."""


def compile_function(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form of a function, which keeps up to :data:`RECOMPILE_LIMIT` graphs."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT}
        return torch.compile(function, backend=backend, **options)
    # before torch 2.12 the limit is one for the whole process
    name = "recompile_limit" if hasattr(dynamo_config, "recompile_limit") else "cache_size_limit"
    setattr(dynamo_config, name, max(getattr(dynamo_config, name), RECOMPILE_LIMIT))
    return torch.compile(function, backend=backend)


def recompile_reason() -> str | None:
    """Return why Dynamo compiles a function again, in Dynamo's words; None for a first compilation.

    To be called within a compilation, by a backend.
    """
    from torch._dynamo import utils

    context = getattr(utils, "get_metrics_context", lambda: None)()
    reason = getattr(context, "_metrics", {}).get("recompile_reason")
    return str(reason) if reason else None


def graph_breaks() -> list[tuple[str, str]]:
    """Return why Dynamo has divided functions in this process, and the line of the user's code: ``file:line``."""
    from torch._dynamo import utils

    breaks: dict[tuple[str, str], None] = {}
    for each in utils.graph_break_reasons:
        line = each.user_stack[-1] if each.user_stack else None
        where = f"{line.filename}:{line.lineno}" if line is not None else "unknown"
        breaks[" ".join(str(each.reason).split())[:300], where] = None
    return list(breaks)
