"""Lets a policy decide for each traced operator whether it becomes ONNX nodes or runs in PyTorch inside the graph."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ort_zero.ortmodule.compat.torch_onnx.exporter_modules import module_of
from ort_zero.ortmodule.compat.torch_onnx.symbolic_helpers import Symbolic, Unexportable
from ort_zero.ortmodule.compat.torch_onnx.traced import ELEM_TYPES, STOP_GRADIENT, TracedNode, TracedValue
from ort_zero.utils.patching import replaced


class Router(Protocol):
    """Decides for each traced operator whether it is exported or runs in PyTorch."""

    def before(self, node: TracedNode) -> str | None:
        """Return why `node` cannot be exported, or None to try."""

    def after(self, node: TracedNode, operators: list[str], of_sizes: frozenset[str] = frozenset()) -> str | None:
        """Return why the ONNX operators `operators` will not do for `node`, or None to keep them.

        Args:
            node: the operator.
            operators: what it has become.
            of_sizes: those of them that compute with sizes and constants alone, so that no gradient goes through them.
        """

    def run_in_torch(self, node: TracedNode, why: str, without_symbolic: bool) -> tuple[list[TracedValue], dict]:
        """Return inputs and attributes of the node that runs `node` in PyTorch.

        Args:
            node: the operator.
            why: why it runs there.
            without_symbolic: the reason is that it has no symbolic, or one that fails.

        Raises:
            TypeError: it cannot.
        """

    def failed(self, node: TracedNode) -> None:
        """Note that `node` can neither be exported nor run in PyTorch by itself."""

    def result_sizes(self, node: TracedNode) -> list[list]:
        """Return the sizes of the results of `node`, None for those that vary; called after :meth:`run_in_torch`."""


@contextlib.contextmanager
def routing(router: Router) -> Iterator[None]:
    """Let `router` decide on every operator that is exported in the block."""
    import torch.onnx

    utils = module_of("utils")
    name = "_run_symbolic_function"
    # the exporter's C++ part looks it up in the package, where it is there (torch 2.8 and before)
    home = torch.onnx if hasattr(torch.onnx, name) else utils
    with (
        replaced(home, name, lambda original: _routed(original, router, utils)),
        replaced(utils, "select_model_mode_for_export", _keeping_modes),
        replaced(torch._C, "_jit_pass_cse", _merging_no_stops),
    ):
        yield


def _routed(original: Callable, router: Router, utils: Any) -> Callable:
    """Return the function that exports one operator of a trace as `router` decides.

    Args:
        original: torch's own, which calls the operator's symbolic.
        router: decides.
        utils: the exporter's module that holds `original`.
    """

    def run(graph, block, node, inputs, env, values_in_env, new_nodes, *rest):
        def export():
            return original(graph, block, node, inputs, env, values_in_env, new_nodes, *rest)

        context = _context(utils, graph, block, node, env, values_in_env, new_nodes)
        if TracedNode(node).passes_on:
            result = _typed(export(), TracedNode(node))
            # the sizes too are those of the argument
            (result[0] if isinstance(result, (list, tuple)) else result).setType(inputs[0].type())
            return result
        if node.kind() == "prim::ConstantChunk":
            return _chunks(node, inputs, context) or export()
        if node.kind() == "prim::Constant" and TracedValue(node.output()).is_complex:
            return _as_pairs(node.t("value"), context)
        # an autograd Function's arguments that are no tensors are given too, which no input of the node stands for
        traced = TracedNode(node, inputs if node.kind() != "prim::PythonOp" else None)
        try:
            if traced.is_control_flow:
                raise Unexportable("is TorchScript code with a branch or a loop, of which ONNX Runtime has no gradient")
            if node.kind() == "prim::PythonOp":
                return _typed(export(), traced)
            if traced.has_blocks or node.kind().partition("::")[0] in ("prim", "onnx"):
                return export()
            result, why, failed = _tried(router, traced, inputs, export)
            if why is None:
                return _as_traced(_unscaled(result, context), traced, context)
            return _run_in_torch(router, traced, why, failed, context)
        except BaseException:
            router.failed(traced)
            raise

    return run


def _typed(result: Any, node: TracedNode) -> Any:
    """Return `result` with the element types and ranks of the trace.

    The exporter knows neither of what Python code returns, and warns of each such node on stderr.
    """
    import torch

    values = list(result) if isinstance(result, (list, tuple)) else [result]
    for value, out in zip(values, node.outputs, strict=False):
        if isinstance(value, torch._C.Value) and out.is_tensor and out.scalar_type and out.rank is not None:
            value.setType(out.jit_type([None] * out.rank))
    return result


def _tried(
    router: Router, node: TracedNode, inputs: list, export: Callable
) -> tuple[Any, str | None, Exception | None]:
    """Export an operator if `router` lets it be exported.

    Returns:
        What its symbolic returned; why it must run in PyTorch all the same, None if it need not; the error of its
        symbolic, if that is the reason.
    """
    why = router.before(node)
    if why is not None:
        return None, why, None
    try:
        result = export()
    except (AttributeError, NameError, ImportError):
        raise  # a mistake in a symbolic is no reason to leave it out
    except Exception as error:
        return None, _in_short(error), error
    return result, router.after(node, *_kinds(result, inputs)), None


def _in_short(error: Exception) -> str:
    """Return the first line of an error's text, without the whole graph that torch's exporter adds to some."""
    text = str(error).strip().partition("[Caused by")[0].strip()
    # what comes next is where to ask for the operator
    return text.splitlines()[0].partition(" Please feel free to request support")[0] if text else repr(error)


def _run_in_torch(router: Router, node: TracedNode, why: str, failed: Exception | None, context: Any) -> Any:
    """Return the results of the PythonOp that runs an operator in PyTorch.

    Raises:
        TypeError: it cannot run there; `failed` instead, if there is one.
    """
    try:
        needed, attributes = router.run_in_torch(node, why, failed is not None)
        if any(value.converted is None for value in needed):
            raise TypeError(f"{node.name}: the exporter has dropped one of its inputs")
    except TypeError as error:
        raise (failed or error) from error
    outputs = node.outputs
    made = context.op("com.microsoft::PythonOp", *(v.converted for v in needed), outputs=len(outputs), **attributes)
    values = list(made) if isinstance(made, (list, tuple)) else [made]
    for value, out, sizes in zip(values, outputs, router.result_sizes(node), strict=True):
        value.setType(out.jit_type(sizes))
    values = _as_traced(values, node, context)
    if node.returns_list:
        return context.op("prim::ListConstruct", *values)
    return values[0] if len(values) == 1 else values


def _merging_no_stops(merge: Callable) -> Callable:
    """Return the pass that merges equal nodes; it leaves a trace alone in which a gradient stops."""

    def merge_equal(graph):
        # it would merge what is computed with gradient with what is computed without
        stops = any(
            TracedNode(node).stops_gradient(TracedValue(out)) for node in graph.nodes() for out in node.outputs()
        )
        return False if stops else merge(graph)

    return merge_equal


def _keeping_modes(select: Callable) -> Callable:
    """Return the context in which the exporter traces a model; it leaves the mode of every submodule as it is."""

    @contextlib.contextmanager
    def keep_modes(model, mode):
        # upstream puts every submodule into the mode of the whole, and leaves it there
        modes = [(part, part.training) for part in model.modules()] if hasattr(model, "modules") else []
        try:
            with select(model, mode):
                _set_modes(modes)
                yield
        finally:
            _set_modes(modes)

    return keep_modes


def _chunks(node, inputs, context):
    """Return the parts of a chunked tensor as slices; None where ORT's gradient of Split, which wants all, will do."""
    traced = TracedNode(node, inputs)
    if not traced.inputs[0].requires_grad or all(out.leads_to_gradient for out in traced.outputs):
        return None
    axis = node.i("dim") % traced.inputs[0].rank
    ends = list(itertools.accumulate(out.traced_sizes[axis] for out in traced.outputs))
    return [
        Symbolic.slice(context, inputs[0], axis, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _as_pairs(numbers, context):
    """Return a constant of complex numbers as one of pairs of real ones, which is what a graph can hold."""
    import torch

    return context.op("Constant", value_t=torch.view_as_real(numbers.resolve_conj()).contiguous())


def _set_modes(modes) -> None:
    for part, training in modes:
        part.training = training


def _unscaled(result, context):
    """Return `result`; a sum of two products with numbers as a difference that ORT's ScaledSumFusion does not know.

    When a third value is added to such a sum, the fusion takes the input of that value's node instead of the value.
    """
    if not hasattr(result, "node") or result.node().kind() != "onnx::Add":
        return result
    one, other = result.node().inputs()
    if not (_is_scaled(one) and _is_scaled(other)):
        return result
    difference = context.op("Sub", one, context.op("Neg", other))
    difference.setType(result.type())
    return difference


_NO_CHANGE = {f"onnx::{name}" for name in ("Identity", "Cast", "Dropout", "Expand", "Reshape", "Slice", "Pad")}
"""Operators that ORT's optimizer may find to change nothing, and leave out."""


def _is_scaled(value) -> bool:
    """Return True if ORT may see the product with a number in `value`, possibly after leaving out what adds zero."""
    while True:
        kind, inputs = value.node().kind(), list(value.node().inputs())
        if kind in _NO_CHANGE:
            value = inputs[0]
            continue
        numbers = [Symbolic.sizes(v) in (None, [], [1]) for v in inputs]
        if kind in ("onnx::Mul", "onnx::Div"):
            return any(numbers)
        if kind not in ("onnx::Add", "onnx::Sub") or not any(numbers):
            return False
        value = inputs[numbers.index(True) - 1]


def _as_traced(result, node: TracedNode, context):
    """Return `result` with the element types of the trace, and without gradient where the trace has none.

    Some symbolics take a constructed integer for a float. None knows ``detach`` and ``torch.no_grad``.
    """
    import torch

    values = list(result) if isinstance(result, (list, tuple)) else [result]
    outputs = list(node.outputs)
    if len(values) != len(outputs):
        return result
    for i, (value, out) in enumerate(zip(values, outputs, strict=True)):
        if not isinstance(value, torch._C.Value) or not out.is_tensor or value.type().kind() != "TensorType":
            continue
        found, wanted = value.type().scalarType(), out.scalar_type
        if found is not None and wanted in ELEM_TYPES and found != wanted:
            values[i] = value = context.op("Cast", value, to_i=ELEM_TYPES[wanted][0])
        if node.stops_gradient(out):
            kind = value.type()
            if value.node().kind() == "prim::Param":
                # ORT asks for the gradient of whatever reads a weight itself; an Identity would be left out
                value = context.op("Sum", value)
                value.setType(kind)
            values[i] = context.op("org.pytorch.aten::ATen", value, operator_s=STOP_GRADIENT)
            values[i].setType(kind)
    return values if isinstance(result, (list, tuple)) else values[0]


def _context(utils, graph, block, node, env, values_in_env, new_nodes):
    return module_of("jit_utils").GraphContext(
        graph=graph,
        block=block,
        opset=utils.GLOBALS.export_onnx_opset_version,
        original_node=node,
        params_dict=utils._params_dict,
        env=env,
        values_in_env=values_in_env,
        new_nodes=new_nodes,
    )


def _kinds(result, inputs) -> tuple[list[str], frozenset[str]]:
    """Return the ONNX operators between `inputs` and `result`, and which compute with sizes and constants alone."""
    import torch

    given = [value for value in inputs if isinstance(value, torch._C.Value)]
    for value in list(given):
        if value.node().kind() == "prim::ListConstruct":
            given += value.node().inputs()
    of_values = {value.debugName(): not _is_whole_number(value) for value in given}
    kinds: list[str] = []
    differentiated: set[str] = set()

    def visit(value) -> bool:
        """Return whether a gradient may go through a value."""
        name = value.debugName()
        if name not in of_values:
            node = value.node()
            of_values[name] = True
            if node.kind() != "prim::Param":
                kind = node.kind().removeprefix("onnx::")
                kinds.append(kind)
                reached = [visit(each) for each in node.inputs()]
                of_values[name] = any(reached) and kind not in ("Shape", "Size")
                if of_values[name]:
                    differentiated.add(kind)
        return of_values[name]

    for value in result if isinstance(result, (list, tuple)) else [result]:
        if isinstance(value, torch._C.Value):
            visit(value)
    return kinds, frozenset(kinds) - differentiated


def _is_whole_number(value) -> bool:
    """Return whether a value is a constant or an integer, which has no gradient."""
    kind = value.type()
    dtype = kind.scalarType() if kind.kind() == "TensorType" else None
    return value.node().kind() in ("onnx::Constant", "prim::Constant") or dtype in ("Long", "Int", "Bool")
