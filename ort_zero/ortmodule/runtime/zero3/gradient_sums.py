"""Adds up the gradients that several runs of a model give one parameter in one backward."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ort_zero.errors import GraphEditError
from ort_zero.ortmodule.compat import torch_ddp
from ort_zero.ortmodule.compat.torch_autograd import LeafInGraph, comes_to, current_backward, has_hooks, leaves_behind
from ort_zero.utils.text import shortened


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a training graph whose backward may come."""

    leaf: LeafInGraph
    """The trigger of the run."""
    parameters: Mapping[str, Any]
    digest: int
    whole_parameters: bool
    in_ddp: bool


class GradientSums:
    """Adds up what several runs give one parameter in one backward, so that it is reduced once, as in PyTorch.

    A loss may hang on several runs of the model (a pair of sentences, two views of one picture). Each run has reduce
    nodes of its own, but ZeRO and DDP want one gradient for each parameter and backward: a second one replaces the
    first, or is refused.

    Args:
        agree: called at the first gradient of each backward with a digest of what it will reduce, in which order; it
            raises if the ranks differ.
    """

    def __init__(self, agree: Callable[[int], None] | None = None) -> None:
        self._runs: list[_Run] = []
        self._agree = agree
        self._backward = -1
        self._reduces_parameters = True
        self._missing: dict[int, int] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def expect_backward(
        self, trigger: torch.Tensor, parameters: Mapping[str, Any], digest: int, whole_parameters: bool
    ) -> None:
        """Note that a run starts: a backward that reaches `trigger` will reduce `parameters`.

        Args:
            trigger: trigger of the run.
            parameters: the parameters by name.
            digest: checksum of the names of the parameters.
            whole_parameters: they are not partitioned, so that the loss may use them outside of the run as well.
        """
        self._runs = [run for run in self._runs if run.leaf.alive()]
        self._runs.append(_Run(LeafInGraph(trigger), parameters, digest, whole_parameters, torch_ddp.in_forward()))

    def reduced_behind(self, nodes: Iterable[Any]) -> list[Any]:
        """Return the parameters that a backward through these nodes of autograd's graph would reduce."""
        leaves = leaves_behind(nodes)
        return [p for run in self._runs if run.leaf.among(leaves) for p in run.parameters.values()]

    def backward_reduces_parameters(self) -> bool:
        """Return whether the backward that runs computes gradients of parameters: ``autograd.grad`` may not.

        Raises:
            GraphEditError: the loss uses parameters in a way that would reduce them twice.
        """
        if self._backward != current_backward():
            self._begin(current_backward())
        return self._reduces_parameters

    def add(self, parameter: Any, gradient: torch.Tensor | None, own_memory: bool) -> tuple[torch.Tensor, bool] | None:
        """Return the gradient to reduce, None if another run of this backward has still to add to it, or if none has.

        The second value says whether the parameter may keep the gradient's memory.

        Args:
            parameter: a parameter of the model.
            gradient: that a run has computed; None for a parameter to which the backward does not lead in this run.
            own_memory: nothing else uses the gradient's memory.
        """
        missing = self._missing.get(id(parameter), 1) - 1
        if missing > 0:
            self._missing[id(parameter)] = missing
            if gradient is None:
                return None
            if id(parameter) in self._sums:
                self._sums[id(parameter)] += gradient
            else:
                # else ORT will use the memory for something else
                self._sums[id(parameter)] = gradient if own_memory else gradient.clone()
            return None
        self._missing.pop(id(parameter), None)
        before = self._sums.pop(id(parameter), None)
        if gradient is None:
            return (before, True) if before is not None else None
        return (gradient, own_memory) if before is None else (before.add_(gradient), True)

    def _begin(self, backward: int) -> None:
        """Find the runs that a backward goes through, and let the ranks agree on them."""
        self._backward = backward
        self._sums.clear()  # a backward that failed leaves some
        self._missing.clear()
        runs = [run for run in self._runs if run.leaf.in_current_backward()]
        self._reduces_parameters = bool(runs) or not self._runs
        if len(runs) > 1:
            for parameter in itertools.chain(*(run.parameters.values() for run in runs)):
                self._missing[id(parameter)] = self._missing.get(id(parameter), 0) + 1
        twice = _reduced_twice(runs)
        if runs and self._agree is not None:
            self._agree(zlib.crc32(repr([[run.digest for run in runs], twice]).encode()))
        if twice:
            raise GraphEditError(
                f"{shortened(twice)} {'is' if len(twice) == 1 else 'are'} used in the loss "
                "outside of the model's forward as well (a penalty on weights?), and with "
                '"memory_efficient_gradients" the gradients from there and from the forward would be reduced apart: '
                "compute that part of the loss in the model's forward, let the optimizer do it (weight_decay), or set "
                '"ort_zero": {"memory_efficient_gradients": false}'
            )


def _reduced_twice(runs: Sequence[_Run]) -> list[str]:
    """Return the names of the parameters that the backward comes to both ways, if anybody waits for their gradients.

    Where nobody does, the two gradients add up as they come.
    """
    return sorted(
        {
            name.removeprefix("_original_module.")
            for run in runs
            for name, parameter in run.parameters.items()
            if run.whole_parameters and (run.in_ddp or has_hooks(parameter)) and comes_to(parameter)
        }
    )
