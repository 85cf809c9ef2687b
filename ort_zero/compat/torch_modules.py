"""What torch and others keep of modules and tensors under names that are not public."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

WRAPPER_ATTRIBUTES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names under which torch's wrappers (``torch.compile``, activation checkpointing, FSDP) hold the module they wrap."""

BOOKKEEPING = re.compile(
    r"_?ds_|_external_params$|_original_parameters$|applied_pre_backward_ref_cnt$"  # what DeepSpeed has done so far
    r"|_?name_or_path$|_commit_hash$|transformers_version$"  # where the weights come from
    r"|_is_hf_initialized$|_original_object_hash$"
)
"""Matches attributes of modules and configurations that change nothing in what a module computes."""


def submodule_table(module: Any) -> dict[str, Any]:
    """Return the very dict in which `module` keeps its submodules by name; values may be None."""
    return module._modules


def parameter_table(module: Any) -> dict[str, Any]:
    """Return the very dict in which `module` keeps its parameters by name; values may be None.

    DeepSpeed's ZeRO-3 puts a subclass of dict there, whose look-up gathers the parameter: read it with dict's methods.
    """
    return module._parameters


def buffer_table(module: Any) -> dict[str, Any]:
    """Return the very dict in which `module` keeps its buffers by name; values may be None."""
    return module._buffers


def forward_hooks(module: Any) -> Mapping[str, list[Callable]]:
    """Return the hooks around the forward of `module`, in their order, by the name of torch's table.

    The keys of the tables are left out: they count up in the process.
    """
    return {name: list(getattr(module, name).values()) for name in ("_forward_hooks", "_forward_pre_hooks")}


def hook_tables(module: Any) -> tuple[dict[int, Callable], ...]:
    """Return the very dicts in which `module` keeps the hooks around its forward and its backward."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def inside_of_compiled(module: Any) -> Any:
    """Return the module that ``torch.compile`` made `module` of."""
    return submodule_table(module)["_orig_mod"]


def version_of(tensor: Any) -> int:
    """Return how often the values of `tensor` were changed in place; views of one tensor count together."""
    return tensor._version


def is_zero_tensor(tensor: Any) -> bool:
    """Return True for a gradient of zeros that autograd did not put into memory."""
    return tensor._is_zerotensor()
