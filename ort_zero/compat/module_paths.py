"""Tell which module of the user a node of an FX graph comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.fx import Node

_ROOT = re.compile(r"^L\['args'\]\[\d+\]|^L\['\w+'\]")
"""Dynamo's name of the compiled module: ``L['self']``, and with torch 2.8 ``L['args'][0]`` in a wrapped forward."""
_PART = re.compile(r"\['([^']+)'\]|\.(\w+)|\[(\d+)\]")


def module_path(node: Node) -> str:
    """Return the path of the innermost module whose forward made a node, or whose backward did; empty for the root."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    innermost = list(stack.values())[-1:] if isinstance(stack, dict) else []
    return _plain(innermost[0][0]) if innermost else ""


def _plain(path: str) -> str:
    """Return a path as ``named_modules`` writes it, of Dynamo's ``L['self']._modules['attn'].proj``."""
    parts = [next(filter(None, match)) for match in _PART.findall(_ROOT.sub("", path))]
    return ".".join(part for part in parts if part not in ("self", "_modules"))


def is_below(node: Node, paths: Sequence[str]) -> bool:
    """Return True if a node comes from one of these modules, or from a module below."""
    path = module_path(node)
    return any(path == each or path.startswith(f"{each}.") for each in paths)
