"""Let PyTorch run a unit whose backward a script differentiates (``create_graph=True``), as for a gradient penalty.

A compiled graph has no second derivative: torch raises an error. So the backwards of a unit's first calls are watched.
In one that is to be differentiated, the unit's forward is computed again in PyTorch, and PyTorch's gradients replace
those of the graph. A unit of several graphs is left to torch's error, and so are regions of activation checkpointing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import get_device_states, set_device_states

from ort_zero.compat.torch_compile import keeps_graph, tensors_in, tree_flatten, tree_unflatten
from ort_zero.compat.torch_modules import version_of


class Call:
    """One call of a unit's forward, made before the compiled forward runs."""

    def __init__(
        self, unit: nn.Module, forward: Callable[..., Any], arguments: Any, differentiated: Callable[[], None]
    ):
        self._unit, self._forward, self._differentiated = unit, forward, differentiated
        leaves, self._structure = tree_flatten(arguments)
        self._leaves: list[Any] = leaves
        tensors = self._tensors()
        self._versions = [version_of(tensor) for tensor in tensors]
        self._random = torch.get_rng_state()
        kinds = {tensor.device.type for tensor in tensors}
        self._random_of_devices: tuple[list[int], list[torch.Tensor]] = ([], [])
        """Numbers of other devices than the CPU, and the states of their generators."""
        if kinds - {"cpu"}:
            self._random_of_devices = get_device_states(*{tensor.device: tensor for tensor in tensors}.values())
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    def _tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    def watch(self, results: Any, graph_node: str) -> None:
        """Watch the backward of the results, if one graph, as its node's name says, made all that need gradients."""
        made = _with_gradients(results)
        nodes: set[Any] = {leaf.grad_fn for leaf in made}
        node = nodes.pop() if len(nodes) == 1 else None
        if node is not None and node.name().startswith(graph_node):  # a result may be a leaf
            self._outputs = [leaf.output_nr for leaf in made]
            self._edges = node.next_functions
            node.register_hook(self._after_backward)

    def _after_backward(self, gradients: Sequence[Any], of_results: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return what replaces the gradients of the graph's inputs; None leaves them."""
        if torch.is_grad_enabled():
            return self._repeated([of_results[number] for number in self._outputs])
        if not keeps_graph():
            self._leaves = []
        return None

    def _repeated(self, of_results: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the gradients of the graph's inputs as functions of all that they depend on."""
        tensors = self._tensors()
        repeat = _Repeat(self._unit, self._forward)
        weights = dict(repeat.named_parameters())
        inputs = list({id(each): each for each in (*tensors, *weights.values()) if each.requires_grad}.values())
        places = [next((i for i, each in enumerate(inputs) if _edge_of(each) == edge), None) for edge in self._edges]
        is_changed = self._versions != [version_of(tensor) for tensor in tensors]
        if is_changed or any(place is None and edge[0] for place, edge in zip(places, self._edges)):
            return None  # torch raises where the gradients are differentiated
        self._differentiated()
        # views, since one input may depend on another; and a second forward must not count in a batch norm's statistics
        views = {id(tensor): tensor.view_as(tensor) for tensor in inputs}
        leaves = [views.get(id(leaf), leaf) for leaf in self._leaves]
        state = {name: views.get(id(weight), weight) for name, weight in weights.items()}
        state |= {name: buffer.clone() for name, buffer in repeat.named_buffers()}
        with torch.random.fork_rng(devices=self._random_of_devices[0]), contextlib.ExitStack() as stack:
            torch.set_rng_state(self._random)
            set_device_states(*self._random_of_devices)
            for device, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            results = functional_call(repeat, state, *tree_unflatten(leaves, self._structure))
        made = zip(_with_gradients(results), of_results, strict=True)
        pairs = [(result, gradient) for result, gradient in made if gradient is not None]
        outputs, of_outputs = zip(*pairs)
        ours = torch.autograd.grad(outputs, list(views.values()), of_outputs, create_graph=True, allow_unused=True)
        return tuple(None if place is None else ours[place] for place in places)


class _Repeat(nn.Module):
    """Calls a unit's own forward, without the hooks around the unit."""

    def __init__(self, unit: nn.Module, function: Callable[..., Any]):
        super().__init__()
        self.unit = unit
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.unit, *args, **kwargs)


def _with_gradients(results: Any) -> list[torch.Tensor]:
    """Return the tensors among results that need gradients, each once."""
    return list({id(tensor): tensor for tensor in tensors_in(results) if tensor.requires_grad}.values())


def _edge_of(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return the node and the number that stand for a tensor in ``next_functions``."""
    return torch.autograd.graph.get_gradient_edge(tensor)[:2]
