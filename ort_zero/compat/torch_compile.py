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
        return torch.compile(function, backend=backend, recompile_limit=RECOMPILE_LIMIT)
    # before torch 2.12 the limit is one for the whole process
    name = "recompile_limit" if hasattr(dynamo_config, "recompile_limit") else "cache_size_limit"
    setattr(dynamo_config, name, max(getattr(dynamo_config, name), RECOMPILE_LIMIT))
    return torch.compile(function, backend=backend)
