"""What Python code of a module takes from the values of tensors, which a trace cannot record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class ValueReadError(BaseException):
    """Python code of a module depends on the values of a tensor, which a trace cannot record.

    Not an Exception: no ``except`` of a model may take it for one of its own.
    """

    def __init__(self, module: torch.nn.Module | None, what: str, where: str, *, random: bool = False):
        super().__init__(f"{what} ({where})")
        self.module = module
        """The innermost module that ran when the value was read."""
        self.random = random
        """Whether random numbers decide about the value, so that it will change sooner or later."""
        self.of_sizes = False
        """Whether the value depends on nothing but sizes, which only a run of the graph can tell."""
        self.of_attribute = False
        """Whether the value depends on nothing but attributes that are inputs of the graph."""
        self.of_partition = False
        """Whether the code changes a weight of which each rank has a part, so that PyTorch would lose the change."""
        self.moves = False
        """Whether the value is an item of a list of which the code moves items to other indices."""
        self.function: Any = None
        """The function that draws the random numbers and makes tensors or arrays of them; None if unknown."""

    @classmethod
    def again(
        cls, module: torch.nn.Module | None, message: str, random: bool = False, of_attribute: bool = False
    ) -> ValueReadError:
        """Return the error whose message is `message`."""
        what, _, where = message.rpartition(" (")
        error = cls(module, what, where.removesuffix(")"), random=random)
        error.of_attribute = of_attribute
        return error


@dataclass(slots=True)
class Guard:
    """A value that Python code took from a tensor while it was traced: the trace holds for this value only."""

    tensor: torch.Tensor
    value: list
    """The elements of `tensor`."""
    read: ValueReadError
