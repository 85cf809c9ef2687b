"""Looks at a ZeRO-3 module without gathering its weights.

During the forward of an engine DeepSpeed gathers a partitioned parameter as soon as anybody looks it up as an attribute
(``deepspeed/runtime/zero/parameter_offload.py: ZeROOrderedDict``), and only the hooks of the module that uses it
partition it again. What merely looks at a module while a graph is built (its ``repr``, a copy of it, a trace) would
leave its weights whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ort_zero.ortmodule.compat import deepspeed_engine as ds_compat


@contextlib.contextmanager
def plain_lookups(module: torch.nn.Module) -> Iterator[None]:
    """Keep DeepSpeed from gathering a partitioned parameter of `module` that is looked up in the block."""
    marked: list[tuple[torch.nn.Module, bool]] = []
    try:
        for child in module.modules():
            old = ds_compat.set_in_forward(child, False)
            if old:
                marked.append((child, old))
        yield
    finally:
        for child, old in marked:
            ds_compat.set_in_forward(child, old)
