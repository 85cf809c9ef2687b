"""Decides what becomes of attributes that change again and again, so that not every step exports a graph.

A number, or a tensor that is no parameter and no buffer, becomes an input of the graph at its second change. Where
Python code wants the number itself, and for all else, the submodules that read it stay in PyTorch. What the model's own
forward reads so can only be exported again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ort_zero.log import get_logger
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.export.attribute_inputs import can_be_input
from ort_zero.ortmodule.runtime.export.attribute_paths import Place, TensorState, is_number
from ort_zero.ortmodule.runtime.guards.attribute_guard import HOOKS, METHODS, AttributeValues, InputKind, ReadValues

CHANGES_OF_INPUTS = 2
"""Number of the change of a number or tensor from which on it is an input of the graph."""
MOST_CHANGES = 3
"""Number of the change of any other value from which on the submodules that read it stay in PyTorch."""


class AttributeChanges:
    """Remembers the changes of attributes that have made one mode of a model export again.

    Args:
        model: name of the model's class, for messages.
    """

    def __init__(self, model: str):
        self._model = model
        self._changes: Counter[Place] = Counter()
        self._refused: dict[Place, str] = {}
        self._proven: set[Place] = set()
        self.inputs: dict[Place, str] = {}
        """Name of the graph input of each attribute that new graphs take as an input."""
        self.carried: dict[Place, ValueReadError] = {}
        """Inputs that the forward changes for the next call, and where it reads them."""

    def note(self, old: ReadValues, now: AttributeValues) -> list[Place]:
        """Count the changes that a new graph is exported for; return the attributes whose readers go to PyTorch."""
        out = []
        for place in old.differing(now):
            if place in (HOOKS, METHODS):
                continue
            self._changes[place] += 1
            value = now.values.get(place)
            value = value.tensor if isinstance(value, TensorState) else value
            before = old.values[place]
            if can_be_input(value) and (is_number(before) or isinstance(before, (TensorState, InputKind))):
                if self._changes[place] < CHANGES_OF_INPUTS:
                    continue
                if place not in self._refused:
                    if place not in self.inputs:
                        self.add(place)
                        name = place.named(self._model)
                        get_logger().info("%s changes often, and is an input of the graph from now on", name)
                    continue
                out.append(place)
            elif self._changes[place] >= MOST_CHANGES:
                out.append(place)
        return out

    @property
    def untried(self) -> list[Place]:
        """Inputs of which no graph has been built yet, but could be without them."""
        return [place for place in self.inputs if place not in self._proven and place not in self.carried]

    @property
    def untried_carried(self) -> list[Place]:
        """Inputs that the forward changes, of which no graph has been built yet."""
        return [place for place in self.inputs if place not in self._proven and place in self.carried]

    def graph_built(self) -> None:
        """Note that a graph with all the inputs has been built."""
        self._proven.update(self.inputs)

    def is_refused(self, place: Place) -> bool:
        """Return whether an attribute cannot be an input of the graph."""
        return place in self._refused

    def add(self, place: Place, carried: ValueReadError | None = None) -> None:
        """Take an attribute for an input of new graphs.

        Args:
            place: the attribute.
            carried: where the forward reads it, if the forward changes it for the next call; else None.
        """
        if carried is not None:
            self.carried[place] = carried
        name = wanted = place.as_input(self._model)
        while name in self.inputs.values():
            name = f"{wanted}_{len(self.inputs)}"
        self.inputs[place] = name

    def refuse(self, places: Iterable[Place], why: str) -> str:
        """Take attributes for inputs no longer: Python code wants their values. Return that in words."""
        names = []
        for place in places:
            self._refused[place] = why
            self.inputs.pop(place, None)
            names.append(place.named(self._model))
        return f"{', '.join(names)} cannot be an input of the graph: {why}"

    def why(self, place: Place) -> str:
        """Return why the submodules that read an attribute stay in PyTorch."""
        why = self._refused.get(place)
        return f"reads {place.named(self._model)}, which changes often" + (f" ({why})" if why else "")
