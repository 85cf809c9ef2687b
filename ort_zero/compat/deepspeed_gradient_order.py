"""Hand the gradients of a unit to DeepSpeed together and in the order of the unit's parameters, on every rank.

ZeRO-2 and 3 fill buckets as autograd makes gradients, and reduce them without asking whose gradients other ranks have
put there. A compiled unit has another order than PyTorch: where one rank alone could not compile it, gradients of
different parameters would be added up, in silence.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from ort_zero.compat.torch_distributed import compares_ranks, require_equal

_HAND_ON = "reduce_ready_partitions_and_remove_grads"
_END = "independent_gradient_partition_epilogue"


def keep_order(optimizer: Any, units: Iterable[nn.Module]) -> None:
    """Have the gradients of each unit reach a ZeRO optimizer in one order; does nothing for other optimizers."""
    if hasattr(type(optimizer), _HAND_ON) and hasattr(type(optimizer), _END):
        order = _Order(optimizer, units)
        setattr(optimizer, _HAND_ON, order.arrived)
        setattr(optimizer, _END, order.end)


class _Order:
    """Stands between the hooks of parameters and the optimizer."""

    def __init__(self, optimizer: Any, units: Iterable[nn.Module]):
        self._optimizer = weakref.ref(optimizer)
        self._class = type(optimizer)
        self._unit_of: dict[int, list[nn.Parameter]] = {}
        for unit in units:
            parameters = [each for each in unit.parameters() if id(each) not in self._unit_of]
            self._unit_of.update((id(each), parameters) for each in parameters)
        self._current: list[nn.Parameter] | None = None
        self._awaited = 0
        """Number of gradients of the current unit."""
        self._waiting: dict[int, tuple[Any, ...]] = {}
        self._handed_on: list[nn.Parameter] = []

    def arrived(self, parameter: nn.Parameter, *group: Any) -> None:
        """Take a gradient from its hook; hand the gradients of a unit on when its last one is here."""
        if parameter.grad is None and getattr(parameter, "grad_accum", None) is None:
            return  # torch calls the hook also where a compiled graph has no gradient for one of its inputs
        unit = self._unit_of.get(id(parameter))
        if unit is not self._current:
            self._flush()
        if unit is None or not self._is_complete(parameter):
            self._hand_on(parameter, group)
            return
        if self._current is None:
            self._current, self._awaited = unit, sum(each.requires_grad for each in unit)
        self._waiting[id(parameter)] = group
        if len(self._waiting) == self._awaited:
            self._flush()

    def _is_complete(self, parameter: nn.Parameter) -> bool:
        """Return True if a parameter's gradient is whole, and DeepSpeed does not postpone its reduction."""
        is_ready = getattr(parameter, "ds_grad_is_ready", True)
        return is_ready and not getattr(self._optimizer(), "_coalesce_grad_reduction", False)

    def _flush(self) -> None:
        unit, waiting = self._current or [], self._waiting
        self._current, self._waiting = None, {}
        for parameter in unit:
            if id(parameter) in waiting:
                self._hand_on(parameter, waiting[id(parameter)])

    def _hand_on(self, parameter: nn.Parameter, group: tuple[Any, ...]) -> None:
        if compares_ranks():
            self._handed_on.append(parameter)
        getattr(self._class, _HAND_ON)(self._optimizer(), parameter, *group)

    def end(self, *arguments: Any, **named: Any) -> Any:
        """Hand on what is left at the end of a backward, of a unit that did not use all of its parameters."""
        self._flush()
        handed_on, self._handed_on = self._handed_on, []
        if handed_on:
            # each rank puts these gradients into buckets that have no names, and adds up what lies at one place
            optimizer: Any = self._optimizer()
            order = [optimizer.get_param_id(each) for each in handed_on]
            require_equal("a reduction", {"the order of gradients": order}, optimizer.dp_process_group)
        return getattr(self._class, _END)(self._optimizer(), *arguments, **named)
