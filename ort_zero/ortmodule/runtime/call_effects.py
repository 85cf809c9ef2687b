"""Carries out what a forward does besides returning a result, after a run of its graph, and returns that result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ort_zero.compat.deepspeed_parameters import is_partitioned
from ort_zero.ortmodule.compat.torch_modules import buffer_table, change_in_place, parameter_table
from ort_zero.ortmodule.runtime import own_memory
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph
from ort_zero.ortmodule.runtime.export import left_behind, pytree
from ort_zero.ortmodule.runtime.export.pytorch_calls import CALLS
from ort_zero.ortmodule.runtime.guards.attribute_guard import AttributeGuard


def carry_out(
    graph: BuiltGraph,
    tensors: Sequence[torch.Tensor],
    arguments: pytree.Call,
    call: tuple[tuple, dict],
    module: torch.nn.Module,
    attribute_guard: AttributeGuard,
) -> Any:
    """Do what the module does besides returning a result, and return that.

    Args:
        graph: the graph that has run.
        tensors: its outputs.
        arguments: the call, taken apart.
        call: positional and keyword arguments of the call.
        module: the user's module.
        attribute_guard: finds attributes of the module.
    """
    effects = graph.effects
    if effects.complex:
        tensors = [torch.view_as_complex(t) if i in effects.complex else t for i, t in enumerate(tensors)]
    if any(t.dtype != dtype for t, dtype in zip(tensors, effects.dtypes, strict=False)):
        cast = [t.to(dtype) for t, dtype in zip(tensors, effects.dtypes, strict=False)]
        tensors = [*cast, *tensors[len(cast) :]]
    first = effects.results + effects.written
    tensors = list(tensors)
    own_memory.separate(
        tensors,
        first,
        arguments.tensors,
        {i: _weight_or_buffer(module, name) for i, name in graph.returned_weights.items()},
        effects.views.indices if effects.views is not None else (),
    )
    with torch.no_grad():
        for i, value in zip(effects.changed, tensors[first:], strict=False):
            with torch.set_grad_enabled(i in effects.changed_with_gradient and value.requires_grad):
                change_in_place(arguments.tensors[i], torch.Tensor.copy_, value)
        for child in effects.counting:
            tracked = child.num_batches_tracked
            assert isinstance(tracked, torch.Tensor)
            change_in_place(tracked, torch.Tensor.add_, 1)  # an update that the exporter leaves out
        for child, mode in effects.modes:
            child.training = mode
        for name, wanted in effects.switched:
            # looked up as an attribute, DeepSpeed would gather it, and nobody would partition it again
            _weight_or_buffer(module, name).requires_grad_(wanted)
        first += len(effects.changed)
        for (place, in_place), value in zip(effects.attributes, tensors[first:], strict=False):
            attribute_guard.assign(place, value, in_place)
        for change, value in zip(effects.buffers, tensors[first + len(effects.attributes) :], strict=False):
            change.carry_out(value)

    def held(name: str) -> torch.Tensor | None:
        """Return a parameter or buffer; None where a gradient that reaches it from outside would be lost."""
        found = _weight_or_buffer(module, name)
        is_weight = isinstance(found, torch.nn.Parameter)
        return None if is_weight and (graph.executor is not None or is_partitioned(found)) else found

    if effects.views is not None:
        effects.views.put_into(tensors, arguments.tensors, held)
    result = graph.info.restore_outputs(tensors, arguments.objects, call, held)
    attribute_guard.write(effects.writes, tensors, arguments.tensors, call)
    behind = effects.results + effects.written - sum(count for _, count in effects.left)
    left_behind.fill(effects.left, tensors[behind:], lambda number: CALLS.numbered(number).take_left())
    return result


def _weight_or_buffer(module: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, key = name.removeprefix("_original_module.").rpartition(".")
    owner = module.get_submodule(path)
    table = buffer_table(owner)
    return table[key] if key in table else dict.__getitem__(parameter_table(owner), key)
