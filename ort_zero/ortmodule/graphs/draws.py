"""Take random operators out of a graph: PyTorch draws before each run what the graph's operators need.

The draws come in the order of the graph's operators, with the sizes and strides that the operators have in PyTorch. So
they equal PyTorch's, and so does the state of the generator afterwards. They become further inputs of the graph: a
dropout multiplies by the dropout of ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from ort_zero.compat.torch_compile import tree_leaves, tree_map
from ort_zero.compat.torch_graphs import SizeReader, Symbols, memory_of
from ort_zero.errors import ExportError
from ort_zero.ortmodule.graphs.rewrites import attention
from ort_zero.ortmodule.graphs.values import value_of

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout)
_OF_SIZES = (torch.rand, torch.randn, torch.randint, torch.randperm)
_OF_LIKES = (torch.rand_like, torch.randn_like, torch.randint_like)
_IN_PLACE = frozenset(("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"))


@dataclass(frozen=True, slots=True)
class _Draw:
    """One tensor that PyTorch draws before a run."""

    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]
    """Positional arguments of `function`: constants, symbolic numbers, and fake tensors in place of empty ones."""
    options: dict[str, Any]
    """Named arguments of `function`."""
    fake: torch.Tensor
    """A fake tensor like the result."""


class Draws:
    """The draws of one graph.

    Args:
        draws: the draws in the order of the graph.
        sizes: computes the sizes of a call.
    """

    def __init__(self, draws: Sequence[_Draw], sizes: SizeReader):
        self._draws, self._sizes = tuple(draws), sizes
        self._evaluated: dict[Symbols, list[tuple[Any, dict[str, Any]]]] = {}

    def fakes(self) -> list[torch.Tensor]:
        """Return a fake tensor like each draw."""
        return [draw.fake for draw in self._draws]

    def make(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors for a call with these arguments; they advance torch's generator."""
        if not self._draws:
            return []
        symbols = self._sizes.symbols(arguments)
        if symbols not in self._evaluated:
            self._evaluated[symbols] = [self._evaluate(draw, symbols) for draw in self._draws]
        with torch.no_grad():
            return [
                draw.function(*tree_map(_allocated, values), **options).contiguous()
                for draw, (values, options) in zip(self._draws, self._evaluated[symbols], strict=True)
            ]

    def _evaluate(self, draw: _Draw, symbols: Symbols) -> tuple[Any, dict[str, Any]]:
        def evaluate(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return self._sizes.evaluate(value, symbols)
            size, stride = (
                tuple(self._sizes.evaluate(n, symbols) for n in part) for part in (value.shape, value.stride())
            )
            return _Like(size, stride, value.dtype, value.device)

        return tree_map(evaluate, draw.arguments), tree_map(evaluate, draw.options)


@dataclass(frozen=True, slots=True)
class _Like:
    """The sizes, strides and kind of an empty tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _allocated(value: Any) -> Any:
    if not isinstance(value, _Like):
        return value
    return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=value.device)


def take_out(graph: fx.Graph, sizes: SizeReader) -> Draws:
    """Replace the random operators of a graph by new inputs, behind all others; return what makes these inputs.

    Args:
        graph: the graph, changed in place; random operators that it keeps are refused later.
        sizes: computes the sizes of a call.

    Raises:
        ExportError: a draw has sizes that the graph's inputs do not tell, or changes a tensor that others read.
    """
    draws: list[_Draw] = []
    last = graph.find_nodes(op="placeholder")[-1]
    for node in list(graph.nodes):
        draw = _draw_of(node)
        if draw is None:
            continue
        if not all(map(sizes.knows, _numbers_in((draw.arguments, draw.options, draw.fake)))):
            raise ExportError(f"{node.name} draws a number of values that the graph's inputs do not tell")
        with graph.inserting_after(last):
            last = graph.placeholder(f"draw_{len(draws)}")
        last.meta["example_value"] = draw.fake
        draws.append(draw)
        _use(graph, node, last)
    return Draws(draws, sizes)


def _draw_of(node: fx.Node) -> _Draw | None:
    """Return the draw that a random operator needs; None for an operator that needs none, or another kind of draw."""
    target: Any = node.target
    if node.op == "call_method" and target in _IN_PLACE:
        return _overwriting(node)
    if node.op != "call_function":
        return None
    values, options = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    if target in _DROPOUTS:
        bound = _bound(values, options, ("input", "p", "training", "inplace"), (0.5, True, False))
        if not bound["training"] or bound["p"] == 0:
            return None
        _refuse_changes(node, bound["inplace"])
        return _Draw(_dropout_of_ones, (bound["input"], target, bound["p"]), {}, _plain_like(bound["input"]))
    if target is F.scaled_dot_product_attention:
        dropout = _bound(values, options, ("query", "key", "value", "attn_mask", "dropout_p"), (None, 0.0))["dropout_p"]
        if not dropout:
            return None
        query, key = (value_of(_argument(node, i, name)) for i, name in enumerate(("query", "key")))
        like = query.new_empty((*query.shape[:-1], key.shape[-2]), requires_grad=False)
        return _Draw(_dropout_of_ones, (like, F.dropout, dropout), {}, like)
    like = values[:1] if target in _OF_LIKES or target is torch.bernoulli else ()
    is_constant = target in (*_OF_SIZES, *_OF_LIKES) or (target is torch.bernoulli and len(values) > 1)
    if not is_constant or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((values[len(like) :], options))):
        return None
    if options.get("generator") is not None:
        raise ExportError(f"{node.name} draws from a generator of its own; draw outside of the module")
    plain = {name: value for name, value in options.items() if name not in ("requires_grad", "out")}
    return _Draw(target, values, plain, value_of(node))


def _overwriting(node: fx.Node) -> _Draw | None:
    """Return the draw of a method such as ``uniform_``, which overwrites a tensor that nothing else reads."""
    tensor = node.args[0]
    if (
        not isinstance(tensor, fx.Node)
        or any(isinstance(each, fx.Node) for each in node.args[1:])
        or node.kwargs.get("generator") is not None
    ):
        return None
    _refuse_changes(node, True)
    fake = value_of(tensor)
    return _Draw(getattr(torch.Tensor, str(node.target)), (fake, *node.args[1:]), dict(node.kwargs), fake)


def _refuse_changes(node: fx.Node, in_place: bool) -> None:
    tensor = _argument(node, 0, "input")
    if in_place and (len(tensor.users) > 1 or tensor.op == "placeholder" or _is_shared_after(node, tensor)):
        raise ExportError(f"{node.name} draws random numbers into a tensor that others read; draw into a new tensor")


def _is_shared_after(node: fx.Node, tensor: fx.Node) -> bool:
    """Return True if behind `node` something reads another value with the memory of `tensor`."""
    nodes = list(node.graph.nodes)
    later = set(nodes[nodes.index(node) + 1 :])
    others = {each for user in later for each in user.all_input_nodes} - {node, tensor} - later
    memory = memory_of(value_of(tensor))
    values = [value for each in others for value in tree_leaves(value_of(each))]
    return any(isinstance(value, torch.Tensor) and memory_of(value) == memory for value in values)


def _use(graph: fx.Graph, node: fx.Node, drawn: fx.Node) -> None:
    """Have a graph use a drawn tensor in place of a random operator."""
    if node.target is F.scaled_dot_product_attention:
        node.target = attention
        node.kwargs = {**node.kwargs, "drawn": drawn}
        return
    replacement = drawn
    if node.target in _DROPOUTS:
        with graph.inserting_before(node):
            replacement = graph.call_function(torch.mul, (_argument(node, 0, "input"), drawn))
            replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


def _dropout_of_ones(like: torch.Tensor, function: Callable[..., torch.Tensor], p: float) -> torch.Tensor:
    return function(like.fill_(1), p, True)


def _plain_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)


def _argument(node: fx.Node, index: int, name: str) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _bound(values: Any, options: Any, names: Sequence[str], defaults: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; the last names have `defaults`."""
    bound = dict(zip(names[len(names) - len(defaults) :], defaults))
    return bound | dict(zip(names, values)) | {name: value for name, value in options.items() if name in names}


def _numbers_in(values: Any) -> list[Any]:
    numbers: list[Any] = []
    for leaf in tree_leaves(values):
        numbers += [*leaf.shape, *leaf.stride()] if isinstance(leaf, torch.Tensor) else [leaf]
    return numbers
