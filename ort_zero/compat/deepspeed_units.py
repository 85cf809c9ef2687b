"""Have DeepSpeed gather the parameters of a module and of the modules below together."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def gather_together(modules: Iterable[nn.Module]) -> None:
    """Make modules leaves of ZeRO-3: their parameters are gathered before the module runs, and released after it.

    To be called before the engine is made, which registers the hooks. ``set_z3_leaf_modules`` does the same for all
    modules of a class.
    """
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    for module in modules:
        if any(True for _ in module.children()):
            set_z3_leaf_module(module, True)
