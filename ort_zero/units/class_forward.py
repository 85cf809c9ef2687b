"""Call the compiled forward of a class of units, or the units' own forwards where no graph is to be made or used."""

from __future__ import annotations

import functools
import operator
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ort_zero import log
from ort_zero.compat import compiled_backward, deepspeed_units, torch_compile
from ort_zero.compat.torch_compile import tree_leaves
from ort_zero.compat.torch_modules import modules_of

_METHODS = (types.FunctionType, property, staticmethod, classmethod)
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
"""Methods of ``nn.Module`` through which a module runs; programs replace few others of its methods."""
_PLAIN = (torch.Tensor, bool, int, float, str, torch.dtype, torch.device, types.NoneType)
_SIZES = 2
"""Combinations of sizes for which calls without gradients are compiled where ONNX Runtime runs all it can: the second
one makes sizes symbolic."""
_WORTH_GRAPHS = 20.0
"""Seconds that a class of units takes in PyTorch, in calls without gradients, before graphs are made for such calls.
Graphs for eight layers of 512 took two seconds, a tenth of that."""


class ClassCode:
    """The methods of the classes of modules that graphs were made of; Dynamo does not see that one is replaced."""

    def __init__(self) -> None:
        self._methods: dict[type, tuple[Callable[[type], Any], Any]] = {}

    def watch(self, unit: nn.Module) -> None:
        """Note the methods that the classes of a unit's modules have now, but for classes that are noted already."""
        for cls in {type(module) for module in modules_of(unit)} - self._methods.keys():
            names = sorted({*_names(cls), *_CALLS})
            read = operator.attrgetter(*names)
            self._methods[cls] = read, read(cls)

    def replaced(self, unit: nn.Module) -> type | None:
        """Return a class of a unit's modules of which a method has been replaced since it was noted, or None."""
        for cls, (read, methods) in self._methods.items():
            if _read(read, cls) != methods and any(type(module) is cls for module in modules_of(unit)):
                return cls
        return None


def _read(read: Callable[[type], Any], cls: type) -> Any:
    try:
        return read(cls)
    except AttributeError:  # a method was removed
        return None


def _names(cls: type) -> Iterator[str]:
    """Yield the names of a class's methods and properties, without special methods and the methods of ``nn.Module``."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            if isinstance(value, _METHODS) and not name.startswith("__"):
                yield name


class ClassForward:
    """The forward of a class of units, compiled by Dynamo once for all of them."""

    def __init__(
        self,
        function: Callable[..., Any],
        compiled: Callable[..., Any],
        compiles_evaluations: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.function, self.compiled = function, compiled
        self.code = ClassCode()
        self._compiles_evaluations, self._clock = compiles_evaluations, clock
        self._sizes: set[Any] = set()
        self._seconds = 0.0
        """Seconds in PyTorch of calls without gradients."""
        self._was_told = False
        self.must_stay_compiled = False
        """Whether a result has left a unit by other ways than its return, where only a graph's backward finds it."""
        self.has_run = False
        """Whether the compiled forward has run, with or without a graph."""
        self.has_trained = False
        """Whether the compiled forward has returned results that need gradients, with or without a graph."""

    def __call__(self, unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a unit of the class."""
        replaced = self.code.replaced(unit)
        if replaced is not None:
            self._tell(replaced)
            return self.function(unit, *args, **kwargs)
        if not torch.is_grad_enabled() and self._stays_in_torch(args, kwargs):
            begin = self._clock()
            results = self.function(unit, *args, **kwargs)
            self._seconds += self._clock() - begin
            return results
        made = torch_compile.conversions()
        if deepspeed_units.is_unit(unit):
            compiled_backward.running.before = functools.partial(self._before_backward, unit)
        try:
            results = self.compiled(unit, *args, **kwargs)
        finally:
            compiled_backward.running.before = None
        self.has_run = True
        if not self.has_trained and torch.is_grad_enabled():
            leaves = tree_leaves(results)
            self.has_trained = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        if torch_compile.conversions() != made:
            self.code.watch(unit)
        return results

    def _before_backward(self, unit: nn.Module) -> None:
        if deepspeed_units.make_whole(unit):
            self.must_stay_compiled = True

    def _stays_in_torch(self, args: Any, kwargs: Any) -> bool:
        """Return True for a call without gradients that is not worth a graph: generation, or a short evaluation.

        A cache of keys and values grows with each call, and each size would make a graph. The forward of reentrant
        activation checkpointing has inputs that need gradients, and is repeated with them: it is compiled.
        """
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in (*args, *kwargs.values())):
            return False
        if not self._compiles_evaluations and self._seconds < _WORTH_GRAPHS:
            return True
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            return True  # an object, as a cache is
        if any(tensor.is_nested for tensor in tensors):
            return True  # as PyTorch's TransformerEncoder has for padding
        sizes = tuple(tensor.shape for tensor in tensors)
        if len(self._sizes) < _SIZES:
            self._sizes.add(sizes)
        return sizes not in self._sizes

    def _tell(self, replaced: type) -> None:
        if not self._was_told:
            self._was_told = True
            log.get_logger().warning(
                "a method of %s was replaced after units with such modules were compiled: PyTorch runs these units as "
                "long as it is; ort_zero.wrap(model) once more compiles them",
                replaced.__name__,
            )
