"""Notices which buffers a module changes while it is traced, in place or by assigning others.

A graph takes buffers as inputs and changes none. What was changed becomes a further output of the graph, which a
forward call puts into the buffer after each run (:meth:`ort_zero.ortmodule.runtime.forward_call.ForwardCall.run`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ort_zero.compat.torch_modules import version_of
from ort_zero.ortmodule.compat.shared_memory import overlap
from ort_zero.ortmodule.compat.torch_modules import (
    buffer_table,
    change_in_place,
    is_batch_norm,
    is_complex,
    is_scripted,
    parameter_table,
)
from ort_zero.ortmodule.compat.trace_state import is_in_graph
from ort_zero.ortmodule.compat.traced_calls import user_line
from ort_zero.ortmodule.compat.value_reads import ValueReadError


@dataclass(frozen=True, slots=True)
class BufferChange:
    """A buffer that the module changes."""

    owner: torch.nn.Module
    name: str

    def carry_out(self, value: torch.Tensor) -> None:
        """Give the buffer its new value."""
        table = buffer_table(self.owner)
        if table[self.name].shape == value.shape:
            change_in_place(table[self.name], torch.Tensor.copy_, value)
        else:
            table[self.name] = value.detach().clone()


class BufferChanges:
    """The buffers and parameters of a module as they are before its trace.

    Args:
        module: the module that is about to be traced. Normalisation modules change their own statistics in the graph.
        outside: modules that PyTorch runs, in which complex buffers may change.
    """

    def __init__(self, module: torch.nn.Module, outside: Sequence[torch.nn.Module] = ()):
        self._outside = {id(owner) for owner in outside}
        owners = [owner for owner in module.modules() if not is_scripted(owner)]
        self._buffers = [
            (BufferChange(owner, name), tensor, version_of(tensor))
            for owner in owners
            if not is_batch_norm(owner)
            for name, tensor in buffer_table(owner).items()
            if tensor is not None
        ]
        self._parameters = [
            (owner, name, tensor, version_of(tensor))
            for owner in owners
            for name, tensor in dict.items(parameter_table(owner))
            if tensor is not None
        ]

    def found(self) -> list[tuple[BufferChange, torch.Tensor]]:
        """Return the buffers that the trace has changed since, with their new values, and put the old ones back.

        Those of submodules that run in PyTorch change there.

        Raises:
            ValueReadError: the trace has changed a parameter, or a complex buffer, which is a constant of the graph.
        """
        changes = []
        for change, before, version in self._buffers:
            table = buffer_table(change.owner)
            now = table.get(change.name)
            if now is None or (now is before and version_of(now) == version):
                continue
            table[change.name] = before
            if (is_complex(now) or is_complex(before)) and id(change.owner) not in self._outside:
                raise ValueReadError(change.owner, f"changes its complex buffer {change.name}", user_line())
            if is_in_graph(now):
                changes.append((change, now.detach()))
        self._refuse_shared([change for change, _ in changes])
        for owner, name, tensor, version in self._parameters:
            if version_of(tensor) != version and is_in_graph(tensor):
                raise ValueReadError(owner, f"changes its parameter {name} in place", user_line())
        return changes

    def _refuse_shared(self, changes: Sequence[BufferChange]) -> None:
        """Raise ValueReadError for a changed buffer whose memory is that of another buffer, or of a parameter."""
        others = [tensor for _, tensor, _ in self._buffers] + [tensor for *_, tensor, _ in self._parameters]
        for change in changes:
            buffer = buffer_table(change.owner)[change.name]
            if any(overlap(buffer, other) for other in others if other is not buffer):
                raise ValueReadError(
                    change.owner, f"changes its buffer {change.name}, which shares memory", user_line()
                )
