"""Show the tensors of compiled modules to subscribers: operators in graphs, and passes over graphs that have them.

A hook that Dynamo traces calls :data:`observe`, which reads a value and changes nothing. In Dynamo's graph,
:func:`follow_gradients` adds :data:`pass_through` where the tensor is made, and AOTAutograd derives its backward.
:func:`remove_pass_throughs` takes them out again: in the backward, :data:`observe_gradient` reads the tensor's whole
gradient, as ``Tensor.register_hook`` does. Observations have no user, so segments are divided no further.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

from ort_zero.compat.operator_mode import computed_by
from ort_zero.compat.torch_compile import tree_leaves
from ort_zero.compat.torch_graphs import module_path
from ort_zero.compat.torch_modules import is_view, version_of
from ort_zero.statistics.collect import operators
from ort_zero.statistics.collect.module_calls import TensorSlot
from ort_zero.statistics.collect.subscribed_model import PLACE, RunAgain, SubscribedModel, running, running_again

_NOBODY = (-1, -1, -1)
_models: weakref.WeakValueDictionary[int, SubscribedModel] = weakref.WeakValueDictionary()
"""The models that tokens name, by :attr:`~.subscribed_model.SubscribedModel.number`."""


@torch.library.custom_op("ort_zero::observe", mutates_args=())
def observe(
    tensor: torch.Tensor, place: str, kind: str, name: str, begins: bool, ends: bool, key: int = -1
) -> torch.Tensor:
    """Show a tensor of a module call to the subscribers, and return a token, int64 [3], for its gradient.

    The token has the numbers of the model, of the step and of the slot; -1 if the gradient is not shown.

    Args:
        tensor: the tensor.
        place: path of the module from the compiled unit.
        kind: ``"input"``, ``"output"`` or ``"inspect"``.
        name: see :attr:`~.module_calls.TensorSlot.name`.
        begins: the tensor is the first input of a call.
        ends: the tensor is the last output of a call.
        key: number of the tensor's :data:`pass_through` in the graph.
    """
    slot = None
    if running:
        model = running[-1]
        slot = _slot_of(model, tensor, place, kind, name, begins, ends) if model.active else None
    elif running_again:
        model = running_again[-1].model
        slot = _earlier_slot(running_again[-1], place, kind, name)
    token = _NOBODY
    if slot is not None and slot.source < 0:
        _models[model.number] = model
        token = model.number, model.step, slot.order
    return torch.tensor(token, device=tensor.device)


@observe.register_fake
def _(tensor: torch.Tensor, *slot: Any, **rest: Any) -> torch.Tensor:
    return tensor.new_empty(3, dtype=torch.int64)


@torch.library.custom_op("ort_zero::pass_through", mutates_args=())
def pass_through(tensor: torch.Tensor, key: int) -> torch.Tensor:
    """Return the tensor; backward calls :data:`gradient_passes` with its gradient."""
    return tensor.clone()


@torch.library.custom_op("ort_zero::gradient_passes", mutates_args=())
def gradient_passes(gradient: torch.Tensor, key: int) -> torch.Tensor:
    """Return the gradient of the tensor that :data:`pass_through` has returned."""
    return gradient.clone()


@torch.library.custom_op("ort_zero::observe_gradient", mutates_args=())
def observe_gradient(gradient: torch.Tensor, token: torch.Tensor) -> None:
    """Show the subscribers the gradient of a tensor, for which :data:`observe` has returned the token."""
    number, step, order = token.tolist()
    model = _models.get(number)
    if model is not None:
        model.show_gradient_of(step, order, gradient)


@pass_through.register_fake
@gradient_passes.register_fake
def _(tensor: torch.Tensor, key: int) -> torch.Tensor:
    return torch.empty_like(tensor)


@observe_gradient.register_fake
def _(gradient: torch.Tensor, token: torch.Tensor) -> None:
    return None


@torch.library.custom_op(
    "ort_zero::observe_operator", mutates_args=(), schema="(Tensor[] inputs, Tensor[] outputs, int number) -> ()"
)
def observe_operator(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], number: int) -> None:
    """Show the tensors that an operator of a graph takes and returns, see :data:`~.operators.in_graphs`."""
    for recorder in operators.recorders:
        recorder.see(number, inputs, outputs)


def _keep_key(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.key = inputs[1]


pass_through.register_autograd(lambda ctx, grad: (gradient_passes(grad, ctx.key), None), setup_context=_keep_key)
OBSERVE, OBSERVE_GRADIENT, OBSERVE_OPERATOR, PASS_THROUGH, _GRADIENT_PASSES = (
    getattr(torch.ops.ort_zero, name).default
    for name in ("observe", "observe_gradient", "observe_operator", "pass_through", "gradient_passes")
)
for _operator in (OBSERVE, OBSERVE_GRADIENT, OBSERVE_OPERATOR):
    has_side_effect(_operator)


def _earlier_slot(again: RunAgain, place: str, kind: str, name: str) -> TensorSlot | None:
    """Return the slot that a tensor had in the forward; None where the unit ran several times in the forward."""
    calls = again.model.calls
    if calls.occurrences(again.unit) != 1:
        return None
    path = calls.path_of(again.unit.get_submodule(place))
    slots = calls.earlier_slots(path, kind, name)
    count = again.slots[path, kind, name]
    again.slots[path, kind, name] += 1
    return slots[count] if count < len(slots) else None


def _slot_of(
    model: SubscribedModel,
    tensor: torch.Tensor,
    place: str,
    kind: str,
    name: str,
    begins: bool,
    ends: bool,
) -> TensorSlot | None:
    calls = model.calls
    call = calls.running
    if kind != "inspect":
        unit = calls.innermost(lambda module: vars(module).get(PLACE) == "")
        if unit is None or unit.module is None:
            return None
        module = unit.module.get_submodule(place)
        call = None if begins else calls.innermost(lambda each: each is module)
        call = call or calls.enter(module)
    if call is None:
        return None
    slot = calls.slot_of(tensor, call, kind, name)
    model.show_tensor(slot, tensor, gradient=False)
    if ends and call.module is not None:
        calls.leave(call.module)
    return slot


# --- passes, which engines call -------------------------------------------------------------------------------------


def is_observation(node: Node) -> bool:
    """Return True for a call of an operator of statistics."""
    return node.target in (OBSERVE, OBSERVE_GRADIENT, OBSERVE_OPERATOR)


def follow_gradients(module: GraphModule) -> None:
    """Add to a graph of Dynamo what the backward needs to meet the gradients of observed tensors."""
    keys = itertools.count()
    for part in module.modules():
        if isinstance(part, GraphModule) and any(node.target is OBSERVE for node in part.graph.nodes):
            _follow_gradients(part.graph, keys, is_nested=part is not module)
            part.recompile()


def _follow_gradients(graph: Graph, keys: Iterator[int], is_nested: bool) -> None:
    followed: set[Node] = set()
    for node in list(graph.nodes):
        tensor: Any = node.args[0] if node.target is OBSERVE else None
        if tensor is None or tensor in followed:
            continue
        value = tensor.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        if is_nested and tensor.op == "placeholder":
            continue  # a region of activation checkpointing is not the tensor's only reader
        if version_of(value) and (is_view(value) or tensor.op in ("placeholder", "get_attr")):
            continue  # a change in place must reach the tensor itself where the graph did not make the memory
        key = next(keys)
        after = tensor.next
        while after.op == "placeholder":
            after = after.next
        with graph.inserting_before(after):
            passed = graph.call_function(PASS_THROUGH, (tensor, key))
        passed.meta = dict(tensor.meta)
        tensor.replace_all_uses_with(passed, delete_user_cb=functools.partial(operator.is_not, passed))
        node.args = (*node.args, key)
        followed.add(passed)


def remove_pass_throughs(graph: Graph) -> None:
    """Remove the pass-throughs from a joint or an inference graph; backward calls of them show gradients instead."""
    tokens = {node.args[6]: node for node in graph.nodes if node.target is OBSERVE and len(node.args) > 6}
    for node in list(graph.nodes):
        if node.target is OBSERVE:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # a second run would be a call of the module
        elif node.target in (PASS_THROUGH, _GRADIENT_PASSES):
            if node.target is _GRADIENT_PASSES and node.args[1] in tokens:
                with graph.inserting_before(node):
                    shown = graph.call_function(OBSERVE_GRADIENT, (node.args[0], tokens[node.args[1]]))
                shown.meta = {name: value for name, value in node.meta.items() if name != "val"}
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def erase_from_backward(backward: Graph) -> None:
    """Erase the forward's calls of ``observe`` from a backward graph, which the partitioner has copied there."""
    for node in list(backward.nodes):
        if node.target is OBSERVE and not node.users:
            backward.erase_node(node)


def observe_operators(graph: Graph, direction: str) -> None:
    """Have a unit's graph show what each operator takes and returns, if the next step is recorded.

    The direction is ``"forward"``, ``"backward"`` or ``"inference"``.
    """
    order = {node: index for index, node in enumerate(graph.nodes)} if operators.recorders else {}
    for node in order:
        name = computed_by(node.target) if node.op == "call_function" else None
        made: list[Any] = [(0, node)]
        if not _is_tensor(node):
            made = [(each.args[1], each) for each in node.users if each.target is operator.getitem and _is_tensor(each)]
        again = direction == "backward" and node.meta.get("partitioner_tag") == "is_forward"
        if name is None or not made or again:
            continue
        places, results = map(list, zip(*made))
        taken = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node) and _is_tensor(leaf)]
        with graph.inserting_after(max(results, key=order.__getitem__)):
            graph.call_function(OBSERVE_OPERATOR, (taken, results, len(operators.in_graphs)))
        phase, line = direction.replace("inference", "forward"), operators.line_of(node.meta.get("stack_trace") or "")
        operators.in_graphs.append((name, operators.Origin(phase, module_path(node), line), places))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
