"""Which gathered weights stay whole until they are used again, within the limits of the DeepSpeed configuration.

DeepSpeed partitions a weight behind a use only if the next one is far away (``stage3_max_reuse_distance``); by default
most weights stay from the forward to the backward. The order of all uses is known from the plan of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ort_zero.ortmodule.runtime.zero3.collective_plan import CollectivePlan, Phase
from ort_zero.ortmodule.runtime.zero3.prefetch_limits import GatherLimits


class KeptWeights:
    """The weights of one model, of all its graphs, that stay whole between two uses.

    Args:
        limits: how much may be gathered.
    """

    def __init__(self, limits: GatherLimits | None = None):
        self.limits = limits or GatherLimits()
        self.elements = 0
        """Number of elements that stay now."""
        self._kept: dict[int, tuple[Any, int]] = {}

    def has_all(self, parameters: set[int]) -> bool:
        """Return whether all `parameters`, given by their ``id``, stay."""
        return parameters <= self._kept.keys()

    def add(self, parameter: Any, size: int, ahead: int) -> bool:
        """Let a parameter stay that is whole if there is room for its `size` elements; return whether it stays.

        Args:
            parameter: a parameter of the model.
            size: in elements.
            ahead: number of elements that are gathered ahead of their use.
        """
        if self.elements + ahead + size > self.limits.live and id(parameter) not in self._kept:
            return False
        self.take([parameter])
        self._kept[id(parameter)] = (parameter, size)
        self.elements += size
        return True

    def take(self, parameters: Iterable[Any]) -> list[Any]:
        """Return those of `parameters` that stayed; the caller decides anew what becomes of them."""
        taken = []
        for parameter in parameters:
            _, size = self._kept.pop(id(parameter), (None, None))
            if size is not None:
                self.elements -= size
                taken.append(parameter)
        return taken


class NextUses:
    """The next use of each weight behind each gather of a plan.

    Args:
        plan: of one graph.
        parameters: those of each event of the plan.
    """

    def __init__(self, plan: CollectivePlan, parameters: Sequence[Sequence[Any]]):
        self._next: dict[tuple[int, int], tuple[int, bool]] = {}
        """By event and parameter: how many elements are gathered before the next use, and if it is in the backward."""
        gathers = plan.gathers(Phase.FORWARD) + plan.gathers(Phase.BACKWARD)
        found: dict[int, tuple[int, Phase]] = {}
        behind = 0
        for index, event in reversed(gathers):
            for parameter in parameters[index]:
                if id(parameter) in found:
                    start, phase = found[id(parameter)]
                    self._next[index, id(parameter)] = (behind - start, phase is Phase.BACKWARD)
            behind += sum(plan.weights[name].numel for name in event.weights)
            found.update((id(parameter), (behind, event.phase)) for parameter in parameters[index])

    def is_near(self, index: int, parameter: Any, *, distance: int, backward: bool) -> bool:
        """Return whether a weight is used again within `distance` elements.

        Args:
            index: of the event that has used it.
            parameter: one of the event's.
            distance: see :class:`GatherLimits`.
            backward: whether the run, if it is in the forward, has a backward.
        """
        elements, in_backward = self._next.get((index, id(parameter)), (distance, False))
        return elements < distance and (backward or not in_backward)
