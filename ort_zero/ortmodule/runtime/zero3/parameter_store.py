"""What the collectives need of whoever holds the parameters: DeepSpeed's ZeRO-3, or plain parameters of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class GradientStore(Protocol):
    """Takes the gradients that the reduce nodes hand over."""

    def reduce(self, gradients: Sequence[tuple[Any, torch.Tensor, bool]]) -> None:
        """Hand each parameter the full gradient of this rank, and the memory with it if that is the gradient's own.

        All ranks must call this with the same parameters.

        Args:
            gradients: parameter, its gradient, and whether the gradient's memory belongs to nothing else.
        """


class ParameterStore(GradientStore, Protocol):
    """Gathers and partitions parameters as well. All ranks make the same calls in the same order."""

    def partitioned(self, parameters: Sequence[Any]) -> list[Any]:
        """Return those whose data is not here and not on its way."""

    def in_flight(self, parameter: Any) -> bool:
        """Return True if the parameter's data is on its way."""

    def start(self, parameters: Sequence[Any]) -> Any:
        """Begin to gather `parameters`; return a handle for :meth:`wait`. All ranks must call this."""

    def wait(self, handle: Any) -> None:
        """Return when the data of a started gather is there. All ranks must call this: some backends work here."""

    def release(self, parameters: Sequence[Any]) -> None:
        """Partition `parameters` again; tensors that were taken from them stay valid."""
