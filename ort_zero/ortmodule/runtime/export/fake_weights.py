"""Puts fake weights of full shape in place of the partitioned weights of a ZeRO-3 module, for its export only.

A fake weight is one element expanded to the full shape: it costs no memory and no collective. Values in the trace are
therefore meaningless; shapes and types are right. :mod:`.runtime.graph_builder` exports inside of these blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ort_zero.compat.deepspeed_parameters import full_shape, is_partitioned
from ort_zero.compat.torch_modules import version_of
from ort_zero.ortmodule.compat import deepspeed_engine as ds_compat
from ort_zero.ortmodule.compat import deepspeed_gathering, trace_state
from ort_zero.ortmodule.compat.torch_modules import buffer_table, change_in_place


@contextlib.contextmanager
def fake_weights(module: torch.nn.Module) -> Iterator[None]:
    """Hold a fake weight in each partitioned parameter of `module`.

    Neither DeepSpeed's forward hooks nor the module's own code gather any of them, provided that the build around it
    looks them up inside of :func:`ort_zero.ortmodule.runtime.export.plain_lookups.plain_lookups`.
    """
    saved: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    linear = torch.nn.functional.linear
    try:
        plain = ds_compat.plain_linear()
        if plain is not None:
            torch.nn.functional.linear = plain
        for i, parameter in enumerate(module.parameters()):
            if is_partitioned(parameter) and tuple(parameter.shape) != full_shape(parameter):
                saved.append((parameter, parameter.data))
                # each has its own storage and value: torch's exporter merges equal initializers
                one = torch.full((1,), 1e-4 * (i + 1), dtype=parameter.dtype, device=parameter.device)
                parameter.data = one.expand(full_shape(parameter))
        with contextlib.ExitStack() as contexts:
            if saved:
                contexts.enter_context(trace_state.dense_operands())
            managed = [p for p in module.parameters() if is_partitioned(p)]
            if managed:
                contexts.enter_context(deepspeed_gathering.nothing_to_gather(managed))
            yield
    finally:
        for parameter, data in saved:
            parameter.data = data
        torch.nn.functional.linear = linear


@contextlib.contextmanager
def unchanged_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Put every buffer of `module` back to its value at the start: tracing runs the module more than once."""
    saved = [(buffer, buffer.detach().clone(), buffer.is_leaf, version_of(buffer)) for buffer in module.buffers()]
    tables = [(table, dict(table)) for owner in module.modules() if (table := buffer_table(owner))]
    try:
        yield
    finally:
        for table, entries in tables:
            table.update(entries)  # a module may have put others in their place
        with torch.no_grad():
            for buffer, value, was_leaf, version in saved:
                if (not was_leaf or buffer.is_complex()) and version_of(buffer) == version:
                    continue  # another model has computed it, and gets its gradient; or graphs hold for its version
                if was_leaf and not buffer.is_leaf:
                    buffer.detach_()  # what was computed during the trace was written into it
                if buffer.shape == value.shape:
                    change_in_place(buffer, torch.Tensor.copy_, value)
