"""Runs a model whose own forward cannot be in a graph: that code in PyTorch, its submodules in graphs of their own.

:mod:`.runtime.divided_model` makes one :class:`SubmoduleGraphs` when a graph of the whole model has failed
on code outside of any submodule. While PyTorch runs that code, each submodule that it calls, the outermost ones first,
is a call of a runtime of its own, with graphs, guards and votes as a model has them. What cannot be in the graph of
such a submodule either is divided again, down to submodules without parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from ort_zero.ortmodule.compat.torch_modules import CALL, is_scripted, plain_call
from ort_zero.ortmodule.compat.torch_transforms import are_replaced, in_transform

_in_torch = [0]
"""Number of blocks of :func:`all_in_torch` that run."""


@contextlib.contextmanager
def all_in_torch() -> Iterator[None]:
    """Let PyTorch run all submodules in the block, those with graphs of their own too."""
    _in_torch[0] += 1
    try:
        yield
    finally:
        _in_torch[0] -= 1


class Part(Protocol):
    """The runtime of a submodule."""

    def status(self) -> dict[str, Any]:
        """Return what runs and why, as plain values."""

    def has_run(self) -> bool:
        """Return whether ONNX Runtime has run the submodule, or part of it."""


class SubmoduleGraphs:
    """The submodules of one model that have graphs of their own.

    Args:
        root: the model.
        why: the reason why its own forward runs in PyTorch.
        in_torch: returns the paths of the submodules that stay in PyTorch as a whole.
        make: returns the runtime of a submodule, given with its path, and the function that calls it in ONNX Runtime.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        why: str,
        in_torch: Callable[[], Mapping[str, str]],
        make: Callable[[torch.nn.Module, str], tuple[Part, Callable]],
    ):
        self.why = why
        self.parts: dict[str, Part] = {}
        """The runtime of each submodule that has been called, by its path."""
        self._root = root
        self._in_torch = in_torch
        self._make = make
        self._runs: dict[str, tuple[torch.nn.Module, Callable]] = {}
        self._tree: tuple = ()
        """What the calls below are made for."""
        self._calls: dict[torch.nn.Module, Callable] = {}
        """What is called in place of a submodule."""
        self._within: dict[torch.nn.Module, list[torch.nn.Module]] = {}
        """Those submodules in each that have such a call as well, itself among them."""
        self._inside = False
        """Whether a submodule runs at the moment: those within it belong to its graph."""

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Let the calls of submodules in the block run in ONNX Runtime.

        Behind it the modules are as they were: a copy of the model, or a call from outside, knows nothing of it.
        """
        self._follow_tree()
        inside, self._inside = self._inside, False
        try:
            with self._replaced(self._calls):
                yield
        finally:
            self._inside = inside

    def _follow_tree(self) -> None:
        in_torch = self._in_torch()
        tree = (len(in_torch), *map(id, self._root.modules()))
        if tree == self._tree:
            return
        found = callable_parts(self._root, in_torch)
        self._calls = {module: functools.partial(self._call, path, module) for path, module in found}
        self._within = {module: [inner for inner in module.modules() if inner in self._calls] for module in self._calls}
        self._tree = tree

    @contextlib.contextmanager
    def _replaced(self, calls: Mapping[torch.nn.Module, Callable]) -> Iterator[None]:
        for module, call in calls.items():
            vars(module)[CALL] = call
        try:
            yield
        finally:
            for module in calls:
                vars(module).pop(CALL, None)

    def _call(self, path: str, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._inside or _in_torch[0] or in_transform() or are_replaced(module.parameters()):
            return plain_call(module, *args, **kwargs)
        known, run = self._runs.get(path, (None, None))
        if known is not module:
            self.parts[path], run = self._make(module, path)
            self._runs[path] = module, run
        assert run is not None
        within = self._within[module]
        for inner in within:  # guards and exports see the modules as the user has made them
            vars(inner).pop(CALL, None)
        self._inside = True
        try:
            return run(*args, **kwargs)
        finally:
            self._inside = False
            for inner in within:
                vars(inner)[CALL] = self._calls[inner]


def callable_parts(
    root: torch.nn.Module, in_torch: Mapping[str, str] | tuple[()] = ()
) -> list[tuple[str, torch.nn.Module]]:
    """Return the submodules, with their paths, that can have a graph: they have a forward, and parameters in them.

    Args:
        root: the model.
        in_torch: paths of submodules that stay in PyTorch with all that is in them.
    """
    return [
        (path, module)
        for path, module in root.named_modules()
        if path
        and type(module).forward is not torch.nn.Module.forward
        and not is_scripted(module)
        and vars(module).get(CALL) is None
        and next(module.parameters(), None) is not None
        and not any(f"{path}.".startswith(f"{other}.") for other in in_torch)
    ]


def merged_graphs(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what the graphs of all submodules are and have done, by mode: numbers added up, lists one after another.

    Args:
        parts: status of each submodule by its path.
    """
    modes: dict[str, dict[str, Any]] = {}
    for path, status in parts.items():
        for mode, graphs in status["graphs"].items():
            merged = modes.setdefault(mode, {})
            for key, value in graphs.items():
                merged[key] = _added(merged.get(key), value, path)
    return modes


def _added(before: Any, value: Any, path: str) -> Any:
    if isinstance(value, dict):
        before = before or {}
        numbers = all(isinstance(v, (int, float)) for v in value.values())
        return {**before, **{k: before.get(k, 0) + v if numbers else v for k, v in value.items()}}
    if isinstance(value, list):
        return [*(before or []), *(f"{path}: {item}" for item in value)]
    if isinstance(value, (int, float)):
        return value + (before or 0)
    return before if value is None else value
