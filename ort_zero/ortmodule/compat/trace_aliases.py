"""Notes which tensors of a trace share memory, and by which functions one is made of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ort_zero.ortmodule.compat.size_program import Evaluation, SizeProgram
from ort_zero.ortmodule.compat.trace_slices import NotExpressibleError

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Source:
    """Stands for the tensor that a view is taken of."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Stands for what a step of a program of sizes computes: a number, or a tensor of which only the shape counts."""

    index: int


@dataclass(frozen=True, slots=True)
class ViewCall:
    """One call of a function of torch that returns a view of its argument."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    path: tuple[int, ...]
    """Where the view stands in the result of the function: () for the result itself."""
    grad: bool
    """Whether gradients were on."""

    def repeat(self, source: torch.Tensor, sizes: Evaluation) -> torch.Tensor:
        """Return the same view of another tensor.

        Args:
            source: what the view is taken of.
            sizes: computes sizes for the shapes of the call.
        """

        def built(part: Any) -> Any:
            if isinstance(part, _Source):
                return source
            if isinstance(part, _Step):
                found = sizes.result(part.index)
                return found.item() if isinstance(found, torch.Tensor) and found.device.type != "meta" else found
            return _mapped(built, part)

        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            result = self.function(*built(self.args), **built(self.kwargs))
        for index in self.path:
            result = result[index]
        return result


class Aliases:
    """The views of one trace.

    Args:
        number_step: returns the step that computes a number of Python's, None for what is no such number.
        shape_step: returns the step that computes a tensor's shape, None for one that no argument decides about.
    """

    def __init__(
        self,
        number_step: Callable[[torch.Tensor], int | None],
        shape_step: Callable[[torch.Tensor], int | None],
    ):
        self._number_step, self._shape_step = number_step, shape_step
        self._sources: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        """View, the tensor it was taken of, and the call, by the ``id()`` of the view."""

    def note(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Note the views among the results of a function, as the functions of torch are called in a trace."""
        if not isinstance(result, (torch.Tensor, tuple, list)):
            return
        given = list(_tensors((args, kwargs)))
        if not given:
            return
        addresses = {_address(tensor): tensor for tensor in reversed(given)}
        for path, tensor in _with_paths(result, ()):
            if any(tensor is other for other in given) or id(tensor) in self._sources:
                continue
            source = addresses.get(_address(tensor))
            if source is not None:
                call = func, args, kwargs, path, torch.is_grad_enabled()
                self._sources[id(tensor)] = tensor, source, call

    def ancestors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that `tensor` is a view of, the nearest first."""
        found: list[torch.Tensor] = []
        while id(tensor) in self._sources and self._sources[id(tensor)][0] is tensor:
            tensor = self._sources[id(tensor)][1]
            found.append(tensor)
        return found

    def are_parts(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two views are parts into which one call has taken a tensor apart."""
        a, b = (self._sources[id(t)][2] if id(t) in self._sources else None for t in (one, other))
        return a is not None and b is not None and a[1] is b[1] and bool(a[3]) and bool(b[3])

    def calls(self, view: torch.Tensor, base: torch.Tensor) -> list[ViewCall] | None:
        """Return the calls that make `view` of `base`, the first one first; None if they cannot be repeated."""
        found = []
        while view is not base:
            _, source, (func, args, kwargs, path, grad) = self._sources[id(view)]
            try:
                plain_args, plain_kwargs = self._plain(args, source), self._plain(kwargs, source)
            except NotExpressibleError:
                return None
            found.append(ViewCall(func, plain_args, plain_kwargs, path, grad))
            view = source
        return found[::-1]

    def _plain(self, part: Any, source: torch.Tensor) -> Any:
        """Return an argument without tensors of the trace."""
        if part is source:
            return _Source()
        if isinstance(part, torch.Tensor):
            step = self._number_step(part)
            if step is None:
                step = self._shape_step(part)
            if step is None:
                raise NotExpressibleError("depends on more than sizes")
            return _Step(step)
        return _mapped(lambda inner: self._plain(inner, source), part)


class Evaluations:
    """What a program of sizes computes for the shapes of the latest calls.

    Args:
        program: the program.
    """

    _MOST = 16

    def __init__(self, program: SizeProgram):
        self._program = program
        self._known: dict[tuple, Evaluation] = {}

    def of(self, shapes: tuple) -> Evaluation:
        """Return the evaluation for the shape of each tensor among the arguments."""
        found = self._known.get(shapes)
        if found is None:
            if len(self._known) >= self._MOST:
                self._known.clear()
            found = self._known[shapes] = Evaluation(self._program, shapes)
        return found


def _address(tensor: torch.Tensor) -> int:
    """Return the number of the memory of a tensor; one of its own for a tensor without, such as a batch of vmap's."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def _mapped(function: Callable[[Any], Any], part: Any) -> Any:
    if isinstance(part, slice):
        return slice(function(part.start), function(part.stop), function(part.step))
    if isinstance(part, tuple):
        return tuple(function(inner) for inner in part)
    if isinstance(part, list):
        return [function(inner) for inner in part]
    if isinstance(part, dict):
        return {key: function(inner) for key, inner in part.items()}
    return part


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, (tuple, list, dict)):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _tensors(inner)


def _with_paths(result: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    if isinstance(result, torch.Tensor):
        yield path, result
    elif isinstance(result, (tuple, list)):
        for i, part in enumerate(result):
            yield from _with_paths(part, (*path, i))
