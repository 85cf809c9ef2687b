"""Have DeepSpeed gather the parameters of a module and of the modules below together, and nothing else of a leaf.

A leaf module of ZeRO-3 (``set_z3_leaf_modules``) also hands its gradients on together, from a backward hook of the
module. That is wrong where its inputs need no gradient: torch calls such a hook before the module's backward. So a unit
is a leaf for the gathers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from ort_zero.compat import deepspeed_hooks
from ort_zero.compat.deepspeed import elements_of, full_size, parameter_offload_of
from ort_zero.compat.torch_distributed import require_equal
from ort_zero.compat.torch_modules import parameters_of
from ort_zero.utils.patching import Patch

_UNIT = "_ort_zero_unit"
_LEAF = "_z3_leaf"
"""The mark that ``set_z3_leaf_module`` sets."""
PREFETCH_BUCKET = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
REDUCE_BUCKET = "reduce_bucket_size"
_MODULE = "deepspeed.runtime.zero.partition_parameters"


def gather_together(modules: Iterable[nn.Module]) -> None:
    """Have the parameters of each module gathered before the module runs, and released after it.

    To be called before the engine is made, which registers the hooks. A leaf module of the user stays one.
    """
    from deepspeed.utils.z3_leaf_module import z3_leaf_module

    for module in modules:
        if any(True for _ in module.children()) and not z3_leaf_module(module):
            setattr(module, _LEAF, True)
            setattr(module, _UNIT, True)


def max_gathered_elements(model: nn.Module, zero: Mapping[str, Any]) -> int:
    """Return the number of elements that plain DeepSpeed gathers at most: those of the largest module and a prefetch.

    Args:
        model: the user's model, before units are gathered together.
        zero: the section ``"zero_optimization"`` of the DeepSpeed config.
    """
    from deepspeed.runtime.zero.config import get_zero_config

    return _largest_module(model) + get_zero_config({"zero_optimization": dict(zero)}).prefetch_bucket_size


def prefetch_less(engine: Any, units: Iterable[nn.Module]) -> None:
    """Have DeepSpeed prefetch fewer elements by as many as a unit has more than the model's largest module.

    To be called once the engine exists: DeepSpeed prefetches from its second step on.
    """
    coordinator = getattr(parameter_offload_of(engine), "param_coordinator", None)
    if hasattr(coordinator, PREFETCH_BUCKET):
        largest = max((elements_of(unit) for unit in units), default=0)
        more = max(0, largest - _largest_module(engine.module))
        setattr(coordinator, PREFETCH_BUCKET, max(0, getattr(coordinator, PREFETCH_BUCKET) - more))


def require_equal_sizes(engine: Any, units: Iterable[nn.Module]) -> None:
    """Raise RankError on all data-parallel ranks, which must all call, if their units or bucket sizes differ.

    Both come from the model and the config of each rank, and decide what goes into a collective.
    """
    names = {id(module): name for name, module in engine.module.named_modules()}
    sizes = {f"the number of elements of unit {names.get(id(unit), '?')}": elements_of(unit) for unit in units}
    sizes[REDUCE_BUCKET] = getattr(engine.optimizer, REDUCE_BUCKET, 0)
    coordinator = getattr(parameter_offload_of(engine), "param_coordinator", None)
    sizes["the size of a prefetch"] = getattr(coordinator, PREFETCH_BUCKET, 0)
    require_equal("training with ort_zero", sizes, engine.seq_data_parallel_group, always=True)


def _largest_module(model: nn.Module) -> int:
    """Return the largest number of elements that DeepSpeed gathers for one module: its own, or all of a user's leaf."""
    from deepspeed.utils.z3_leaf_module import z3_leaf_module

    def elements(module: nn.Module) -> int:
        if z3_leaf_module(module) and not is_unit(module):
            return elements_of(module)
        return sum(map(full_size, module.parameters(recurse=False)))

    return max(map(elements, model.modules()), default=0)


def is_unit(module: nn.Module) -> bool:
    """Return True if :func:`gather_together` has DeepSpeed gather all parameters below a module at once."""
    return getattr(module, _UNIT, False)


def make_whole(unit: nn.Module) -> bool:
    """Gather the weights of a unit whose backward begins, if DeepSpeed has not; return whether that was needed.

    DeepSpeed sees no result that leaves a unit by an argument, a global or an attribute.
    """
    if all(parameter.numel() == full_size(parameter) for parameter in parameters_of(unit)):
        return False
    deepspeed_hooks.count_use(unit)
    getattr(unit, deepspeed_hooks.BEFORE_BACKWARD).run(unit)
    return True


def hand_gradients_on(root: nn.Module) -> None:
    """Have each gradient of the units below `root` handed on as soon as it exists, as other modules do.

    To be called between the registrations of the hooks of modules and those of parameters.
    """
    for module in root.modules():
        if is_unit(module):
            for parameter in module.parameters():
                if getattr(parameter, "ds_z3_leaf_module", None) is module:
                    delattr(parameter, "ds_z3_leaf_module")


def patches() -> tuple[Patch, ...]:
    """Return the patch of ``GatheredParameters`` that leaves out parameters which a running module has gathered.

    They are whole already, and DeepSpeed refuses to release what a running module uses.
    """
    why = "a unit's forward may gather weights that are gathered with the unit"
    return (Patch.in_module(_MODULE, "GatheredParameters.__enter__", _without_whole, why),)


def _without_whole(original: Any, self: Any) -> Any:
    if self.enabled and self.src_rank is None:  # else the block changes weights, which DeepSpeed must see
        self.params = [each for each in self.params if not each.ds_active_sub_modules]
        self.enabled = bool(self.params)
    return original(self)


def linear_in_graphs() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return DeepSpeed's linear layer for ZeRO-3, which from now on is one call in Dynamo's graphs, and torch's.

    DeepSpeed's takes the place of ``torch.nn.functional.linear``. Dynamo would trace the autograd Function in it.
    """
    import torch
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    torch.compiler.allow_in_graph(zero3_linear_wrap)
    return zero3_linear_wrap, torch._C._nn.linear
