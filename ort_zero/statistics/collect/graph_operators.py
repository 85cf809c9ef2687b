"""Show the tensors of compiled modules to subscribers: the operators that :mod:`.graph_capture` adds to graphs.

A hook that Dynamo traces calls :data:`observe`. A compile backend then adds :data:`pass_through` where the tensor is
made, so that the backward meets the tensor's whole gradient, as ``Tensor.register_hook`` does: see
:mod:`ort_zero.statistics.collect.graph_passes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.node import has_side_effect

from ort_zero.statistics.collect import operators
from ort_zero.statistics.collect.graph_capture import PLACE
from ort_zero.statistics.collect.module_calls import TensorSlot
from ort_zero.statistics.collect.subscribed_model import RunAgain, SubscribedModel, running, running_again

_NOBODY = (-1, -1, -1)
NAMES = ("observe", "observe_gradient", "pass_through", "gradient_passes")
"""Names of the operators in ``torch.ops.ort_zero``."""
_models: weakref.WeakValueDictionary[int, SubscribedModel] = weakref.WeakValueDictionary()
"""The models that tokens name, by :attr:`~.subscribed_model.SubscribedModel.number`."""


@torch.library.custom_op("ort_zero::observe", mutates_args=())
def observe(
    tensor: torch.Tensor, place: str, kind: str, name: str, begins: bool, ends: bool, key: int = -1
) -> torch.Tensor:
    """Show a tensor of a module call to the subscribers, and return a token, int64 [3], for its gradient.

    Args:
        tensor: the tensor.
        place: path of the module from the compiled unit.
        kind: ``"input"``, ``"output"`` or ``"inspect"``.
        name: see :attr:`~.module_calls.TensorSlot.name`.
        begins: the tensor is the first input of a call.
        ends: the tensor is the last output of a call.
        key: number of the tensor's :data:`pass_through` in the graph.
    """
    return torch.tensor(_shown(tensor, place, kind, name, begins, ends), device=tensor.device)


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
for _name in ("observe", "observe_gradient", "observe_operator"):
    has_side_effect(getattr(torch.ops.ort_zero, _name).default)


def _shown(tensor: torch.Tensor, place: str, kind: str, name: str, begins: bool, ends: bool) -> tuple[int, int, int]:
    """Show a tensor; return the numbers of the model, of the step, and of the tensor's slot if its gradient counts."""
    if running:
        model = running[-1]
        slot = _slot_of(model, tensor, place, kind, name, begins, ends) if model.active else None
    elif running_again:
        model = running_again[-1].model
        slot = _earlier_slot(running_again[-1], place, kind, name)
    else:
        return _NOBODY
    if slot is None or slot.source >= 0:
        return _NOBODY
    _models[model.number] = model
    return model.number, model.step, slot.order


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
