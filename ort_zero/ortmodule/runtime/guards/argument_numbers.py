"""Decides which numbers among the arguments of calls become inputs of the graph, so that not every call exports one.

Packed batches come with the length of their longest sequence as a Python number, schedules hand over a step. At its
second change such a number becomes an input. Where Python code wants the number itself, it is a constant again.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence

from ort_zero.ortmodule.runtime.export import structure_changes

CHANGES_OF_INPUTS = 2
"""Number of the change of an argument from which on it is an input of the graph."""


class ArgumentNumbers:
    """Remembers the changes of numbers among the arguments that have made one mode of a model export again.

    Args:
        parameters: parameters of the module's ``forward``.
    """

    def __init__(self, parameters: Sequence[inspect.Parameter]):
        self._parameters = parameters
        self._changes: Counter[str] = Counter()
        self._refused: set[str] = set()
        self.inputs: set[str] = set()
        """Names of the arguments whose numbers are inputs of new graphs."""

    def note(self, old: tuple, new: tuple) -> list[str]:
        """Count the changes between the structures of two calls; return the arguments that have become inputs."""
        added = []
        for name in structure_changes.changed_numbers(old, new, self._parameters):
            self._changes[name] += 1
            if self._changes[name] >= CHANGES_OF_INPUTS and name not in self._refused:
                added.append(name)
        self.inputs.update(added)
        return added

    def refuse(self, names: Iterable[str]) -> None:
        """Take numbers for inputs no longer."""
        self._refused.update(names)
        self.inputs -= self._refused
