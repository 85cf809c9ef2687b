"""Read what torch notes of the values and operators in captured graphs, where that has no public name (2.7 to 2.15)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ort_zero.utils.patching import replaced

__all__ = ("HigherOrderOperator", "TorchDispatchMode")
Symbols = tuple[int, ...]
"""The values of a graph's symbols in one call."""
_ROOT = re.compile(r"^L\['args'\]\[\d+\]|^L\['\w+'\]")
"""Dynamo's name of the compiled module: ``L['self']``, and with torch 2.8 ``L['args'][0]`` in a wrapped forward."""
_PART = re.compile(r"\['([^']+)'\]|\.(\w+)|\[(\d+)\]")


def expression_of(size: torch.SymInt) -> Any:
    """Return the expression of sympy that stands for a size."""
    return size.node.expr


@contextmanager
def fake_mode_of(tensors: Iterable[Any]) -> Iterator[None]:
    """Enter the mode in which fake tensors were made, or a new one; tensors with values may be among the operands."""
    mode = next((tensor.fake_mode for tensor in tensors if hasattr(tensor, "fake_mode")), None) or FakeTensorMode()
    with replaced(mode, "allow_non_fake_inputs", lambda _: True), mode:
        yield


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors share which share memory, also fake ones."""
    return tensor.untyped_storage()._cdata


def schema_of(operator: Any) -> Any:
    """Return the schema of an ATen operator: arguments with their defaults, results, and what is changed in place."""
    return operator._schema


def name_of(operator: Any) -> str:
    """Return the name of an ATen operator without namespace and overload: ``add``."""
    return schema_of(operator).name.partition("::")[2]


_DRAWN_AGAIN = ("run_and_save_rng_state", "run_with_rng_state")
"""Operators of a traced graph that run a checkpointed region (activation checkpointing), whose draws are repeated."""


def is_random(target: Any) -> bool:
    """Return True for the target of a call that draws from torch's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or str(target) in _DRAWN_AGAIN


def copied(module: GraphModule) -> GraphModule:
    """Return a copy of a graph with the same constants: tensors cannot be copied while AOTAutograd traces."""
    graph = Graph()  # copy.deepcopy of a graph also copies its pytrees, which warns of torch's own future
    copies: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    results, output = copies
    graph.output(results).meta = dict(output.meta)
    return GraphModule(module, graph)


def line_of(node: Node) -> str:
    """Return the line of the user's code that a node of a captured graph comes from, or the node's name."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip(" ^~")]
    return trace[-1] if trace else node.name


def flops_of(module: GraphModule, fakes: Sequence[Any]) -> int:
    """Return the floating-point operations of a run, by torch's counter; symbolic sizes have their first values."""
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), fake_mode_of(fakes), counter:
            module(*fakes)
    except Exception:  # an operator without a fake kernel
        return 0
    total = counter.get_total_flops()
    return total if isinstance(total, int) else int(total.node.hint)


class SizeReader:
    """Reads the symbols of a graph, which stand for sizes that change, from a call's arguments, and computes sizes."""

    def __init__(self, fakes: Sequence[Any]):
        self._sources: dict[Any, tuple[int, int | None]] = {}
        for place, fake in enumerate(fakes):
            if isinstance(fake, torch.SymInt):
                self._sources.setdefault(expression_of(fake), (place, None))
            elif isinstance(fake, torch.Tensor):
                for dim, size in enumerate(fake.shape):
                    if isinstance(size, torch.SymInt):
                        self._sources.setdefault(expression_of(size), (place, dim))
        self._sources = {symbol: source for symbol, source in self._sources.items() if symbol.is_Symbol}

    def __bool__(self) -> bool:
        """Return True if the graph has sizes that change."""
        return bool(self._sources)

    def symbols(self, arguments: Sequence[Any]) -> Symbols:
        """Return the values of the symbols in a call."""
        return tuple(
            int(arguments[place]) if dim is None else arguments[place].shape[dim]
            for place, dim in self._sources.values()
        )

    def evaluate(self, value: Any, symbols: Symbols) -> Any:
        """Return a symbolic number as a number, and anything else unchanged."""
        return self.compute(expression_of(value), symbols) if isinstance(value, torch.SymInt) else value

    def compute(self, expression: Any, symbols: Symbols) -> int:
        """Return the value of an expression of symbols."""
        return int(expression.xreplace(dict(zip(self._sources, symbols, strict=True))))

    def knows(self, value: Any) -> bool:
        """Return True if a number follows from the graph's inputs, so that :meth:`evaluate` can compute it."""
        return not isinstance(value, torch.SymInt) or self.knows_expression(expression_of(value))

    def knows_expression(self, expression: Any) -> bool:
        """Return True if the graph's inputs tell the value of an expression."""
        return expression.free_symbols <= self._sources.keys()


def copy_sizes(module: GraphModule) -> None:
    """Give each user of a ``torch.Size`` a call of its own: AOTAutograd compiles no part that returns one."""
    for node in [each for each in module.graph.nodes if is_size(each)]:
        for user in list(node.users):
            with module.graph.inserting_before(user):
                user.replace_input_with(node, module.graph.node_copy(node))
        module.graph.erase_node(node)
    module.recompile()


def is_size(node: Node) -> bool:
    """Return True for a node whose value is a ``torch.Size``."""
    return isinstance(node.meta.get("example_value"), torch.Size)


def module_path(node: Node) -> str:
    """Return the path of the innermost module whose forward made a node, or whose backward did; empty for the root."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    innermost = list(stack.values())[-1:] if isinstance(stack, dict) else []
    return _plain(innermost[0][0]) if innermost else ""


def _plain(path: str) -> str:
    """Return a path as ``named_modules`` writes it, of Dynamo's ``L['self']._modules['attn'].proj``."""
    parts = [next(filter(None, match)) for match in _PART.findall(_ROOT.sub("", path))]
    return ".".join(part for part in parts if part not in ("self", "_modules"))


def is_below(node: Node, paths: Sequence[str]) -> bool:
    """Return True if a node comes from one of these modules, or from a module below."""
    path = module_path(node)
    return any(path == each or path.startswith(f"{each}.") for each in paths)
