"""Keeps what the Python code of PyTorch's parts of a graph leaves behind, for a run that may have to be repeated.

A submodule that stays in PyTorch counts its calls, fills its lists and advances its iterators while the graph runs.
When a guard behind the run fails, another graph runs for the same call, and would do so a second time.
"""

from __future__ import annotations

import sys

import torch

from ort_zero.compat.torch_modules import version_of
from ort_zero.ortmodule.compat.frames import is_foreign
from ort_zero.ortmodule.compat.torch_modules import is_scripted
from ort_zero.ortmodule.runtime.export.attribute_state import AttributeState
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules

_MOST_ITEMS = 4096
"""Maximum number of items of a container that is copied for each run: a script's globals may hold its data."""


class PartStates:
    """The attributes, containers and iterators of the submodules that stay in PyTorch, as they are at the moment.

    Args:
        root: the model.
        excluded: its submodules that run in PyTorch.
    """

    def __init__(self, root: torch.nn.Module, excluded: ExcludedModules):
        parts = [root.get_submodule(path) for path in excluded.reasons]
        parts = [part for part in parts if not is_scripted(part) and any(map(_is_users, part.modules()))]
        self._states = [AttributeState(part, most_items=_MOST_ITEMS) for part in parts]
        self._tensors = [
            (value, value.detach().clone(), version_of(value))
            for part in parts
            for module in part.modules()
            for value in vars(module).values()
            if isinstance(value, torch.Tensor)
        ]
        self._iterators = list(excluded.iterators.values())
        for iterator in self._iterators:
            iterator.run_begins()

    def restore(self) -> None:
        """Put everything back to what it was then."""
        for state in self._states:
            state.restore(None, ())
        with torch.no_grad():
            for tensor, value, version in self._tensors:
                if version_of(tensor) != version:
                    tensor.copy_(value)
        for iterator in self._iterators:
            iterator.rewind()
            iterator.run_ends()

    def end(self) -> None:
        """Let the run hold."""
        for iterator in self._iterators:
            iterator.run_ends()


def _is_users(module: torch.nn.Module) -> bool:
    """Return whether a class of the module's is not one of torch's."""
    return not is_foreign(getattr(sys.modules.get(type(module).__module__), "__file__", None) or "")
