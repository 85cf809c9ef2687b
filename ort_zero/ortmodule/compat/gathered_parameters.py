"""The parameters of a model as gather and reduce nodes see them: whole ones, and those that ZeRO-3 partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ort_zero.compat.deepspeed_parameters import is_partitioned
from ort_zero.ortmodule.compat import deepspeed_engine as ds_compat
from ort_zero.ortmodule.compat.deepspeed_allocations import GatherAllocations


class PlainParameters:
    """Takes gradients for parameters that are whole on every rank: ZeRO-0 to 2, DDP, no engine at all."""

    def reduce(self, gradients: Sequence[tuple[Any, torch.Tensor, bool]]) -> None:
        """Run the backward of each parameter in turn, and with it the hooks of DeepSpeed, of DDP and of the user."""
        lent, given = [], []
        for parameter, gradient, own_memory in gradients:
            # ORT will use the memory for something else. DeepSpeed copies at once what it sees; others might keep it.
            if own_memory:
                given.append(gradient)
            elif ds_compat.has_own_hooks_alone(parameter):
                given.append(gradient)
                lent.append((parameter, gradient))
            else:
                given.append(gradient.clone())
        with torch.enable_grad():
            # Autograd copies a gradient that it is given, but takes over one that a node made. A view has such a node.
            # Of several nodes it begins with the newest.
            views = [parameter.view_as(parameter) for parameter, _, _ in reversed(gradients)]
            torch.autograd.backward(views, given[::-1])
        for parameter, gradient in lent:
            if _same_memory(parameter.grad, gradient):
                parameter.grad.data = parameter.grad.clone()
        for parameter, _, _ in gradients:
            ds_compat.reduce_leaf_gradient(parameter)


class DeepSpeedParameters(PlainParameters):
    """Gathers, partitions and reduces through the methods that DeepSpeed puts on each parameter.

    Args:
        take: returns the memory for what is gathered on the CPU: a number of elements of a type.
    """

    def __init__(self, take: Callable[[int, torch.dtype], torch.Tensor] | None = None) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._status = ZeroParamStatus
        self._allocations = contextlib.nullcontext() if take is None else GatherAllocations(take)

    def partitioned(self, parameters: Sequence[Any]) -> list[Any]:
        """Return those whose data is not here and not on its way."""
        return [p for p in parameters if is_partitioned(p) and p.ds_status == self._status.NOT_AVAILABLE]

    def in_flight(self, parameter: Any) -> bool:
        """Return True if the parameter's data is on its way."""
        return is_partitioned(parameter) and parameter.ds_status == self._status.INFLIGHT

    def start(self, parameters: Sequence[Any]) -> Any:
        """Begin to gather; all ranks of the partition group must call."""
        with self._not_in_flight_after_errors(parameters), self._allocations:
            return parameters[0].all_gather_coalesced(list(parameters)), list(parameters)

    def wait(self, handle: Any) -> None:
        """Return when the data is there."""
        gather, parameters = handle
        with self._not_in_flight_after_errors(parameters), self._allocations:
            gather.wait()

    @contextlib.contextmanager
    def _not_in_flight_after_errors(self, parameters: Sequence[Any]) -> Iterator[None]:
        """Run a block; after an error in it, no parameter waits for a gather that nobody will finish.

        DeepSpeed notes a parameter as on its way before it takes the memory for it.
        """
        try:
            yield
        except BaseException:
            for parameter in parameters:
                if self.in_flight(parameter):
                    parameter.ds_status = self._status.NOT_AVAILABLE
            raise

    def release(self, parameters: Sequence[Any]) -> None:
        """Partition those that are whole; what was taken from them stays valid."""
        whole = [parameter for parameter in parameters if parameter.ds_status == self._status.AVAILABLE]
        if whole:
            whole[0].partition(whole)

    def reduce(self, gradients: Sequence[tuple[Any, torch.Tensor, bool]]) -> None:
        """Run the backward of each parameter in turn; while they run, the parameters seem to be whole."""
        saved = [(parameter, parameter.data) for parameter in self.partitioned([p for p, _, _ in gradients])]
        shapes = {id(parameter): gradient for parameter, gradient, _ in gradients}
        for parameter, _ in saved:
            parameter.data = shapes[id(parameter)].detach()  # carries the full shape only
        try:
            super().reduce(gradients)
        finally:
            for parameter, data in saved:
                if self.partitioned([parameter]):
                    parameter.data = data


def _same_memory(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
