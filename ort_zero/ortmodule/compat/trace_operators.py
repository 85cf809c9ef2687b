"""Operators of ours for what torch's tracer records in a form that its exporter gets wrong.

Assignments to parts of a tensor (``t[index] = value``): the exporter's form keeps sizes of the first batch, and is
wrong for masks and for tensors among the indices. Complex numbers: the exporter knows none.
"""

from __future__ import annotations

import json
from typing import Any

import torch

OPERATOR = "ort_zero::setitem"
"""Operator that returns a copy of a tensor with other values at some indices."""


def assign(target: torch.Tensor, index: Any, value: Any) -> None:
    """Do ``target[index] = value``, and record it as a copy into a slice, or as one operator."""
    parts = _parts(target, index)
    if parts is None:
        target[index] = value
    elif _is_fill(parts, value):
        # the exporter would lay a mask of the first axes along the last ones
        mask = parts[0][(..., *[None] * (target.dim() - parts[0].dim()))]
        target[mask.expand_as(target) if mask.dim() > parts[0].dim() else mask] = value
    elif all(isinstance(part, (int, slice)) or part is None for part in parts):
        if isinstance(value, torch.Tensor) and value.dim():
            view = target[tuple(parts)]
            while value.dim() > view.dim():
                value = value.squeeze(0)
            value = value.expand_as(view)
        target[tuple(parts)] = value
    else:
        tensors: list[torch.Tensor] = []
        form = json.dumps([_described(part, tensors) for part in parts])
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=target.dtype, device=target.device)
        target[(slice(None),) * target.dim()] = torch.ops.ort_zero.setitem(target, value, tensors, form)


def _parts(target: torch.Tensor, index: Any) -> list | None:
    """Return the index for each axis, without an ellipsis; None for what only PyTorch understands."""
    given = list(index) if isinstance(index, tuple) else [index]
    given = [torch.as_tensor(part) if _is_array(part) else part for part in given]
    if not all(isinstance(part, (int, slice, torch.Tensor)) or part is None or part is Ellipsis for part in given):
        return None
    if any(isinstance(part, bool) for part in given):
        return None
    taken = sum(_axes_of(part) for part in given if part is not Ellipsis)
    if any(part is Ellipsis for part in given):
        at = next(i for i, part in enumerate(given) if part is Ellipsis)
        given[at : at + 1] = [slice(None)] * (target.dim() - taken)
    return given


def _is_array(part: Any) -> bool:
    return isinstance(part, list) or (hasattr(part, "__array__") and not isinstance(part, torch.Tensor))


def _axes_of(part: Any) -> int:
    """Return the number of axes that a part of an index is for."""
    if part is None:
        return 0
    return part.dim() if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def _is_fill(parts: list, value: Any) -> bool:
    """Return True for one number at the places of one mask, which the exporter knows."""
    if len(parts) != 1 or not isinstance(parts[0], torch.Tensor) or parts[0].dtype != torch.bool:
        return False
    return not isinstance(value, torch.Tensor) or (value.dim() == 0 and not value.requires_grad)


def _described(part: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a part of an index as JSON can hold it; tensors go into `tensors`."""
    if isinstance(part, slice):
        return {"slice": [_described(bound, tensors) for bound in (part.start, part.stop, part.step)]}
    if isinstance(part, torch.Tensor):
        tensors.append(part)
        return {"tensor": len(tensors) - 1}
    return part if part is None else int(part)


def _built(part: Any, tensors: list[torch.Tensor], *, bound: bool = False) -> Any:
    """Return the part of an index that :func:`_described` has described."""
    if not isinstance(part, dict):
        return part
    if "slice" in part:
        return slice(*(_built(item, tensors, bound=True) for item in part["slice"]))
    tensor = tensors[part["tensor"]]
    return int(tensor) if bound else tensor


def _setitem(target: torch.Tensor, value: torch.Tensor, indices: list[torch.Tensor], form: str) -> torch.Tensor:
    result = target.clone()
    if target.device.type != "meta":  # shapes are all that is wanted there, and masks have none
        result[tuple(_built(part, indices) for part in json.loads(form))] = value
    return result


def copied(func: Any, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Return the tensor that ``torch.tensor(t)`` makes of a tensor, which the tracer takes for a constant.

    Returns:
        None for other functions and arguments.
    """
    if func not in _COPYING or not args or not isinstance(args[0], torch.Tensor):
        return None
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    source = args[0].detach() if func is torch.tensor else args[0]
    if func is torch.tensor or kwargs.get("copy"):
        source = source.clone()
    made = source.to(device=kwargs.get("device") or source.device, dtype=dtype or source.dtype)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


_COPYING = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def computed_after(tensor: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the trace as a graph cannot compute it before `earlier`, whose node changes what others read.

    ONNX Runtime would see through a mere change of its shape.
    """
    if not earlier.dim():
        return tensor
    nothing: Any = earlier.size(0) * 0  # a tensor while a trace is made
    return tensor ^ (nothing != 0) if tensor.dtype == torch.bool else tensor + nothing.to(tensor.dtype)


def complex_number(number: complex, like: torch.Tensor) -> torch.Tensor:
    """Return a complex number as a tensor without axes that nothing takes for a constant.

    Args:
        number: the number.
        like: a tensor of the trace, whose precision it gets.
    """
    return torch.ops.ort_zero.complex_number(like, number.real, number.imag)


def _complex_number(like: torch.Tensor, real: float, imag: float) -> torch.Tensor:
    dtype = torch.promote_types(like.dtype, torch.complex64)
    return torch.full((), complex(real, imag), dtype=dtype, device=like.device)


_library = torch.library.Library("ort_zero", "FRAGMENT")
_library.define("setitem(Tensor target, Tensor value, Tensor[] indices, str form) -> Tensor")
_library.impl("setitem", _setitem, "CompositeImplicitAutograd")
_library.define("complex_number(Tensor like, float real, float imag) -> Tensor")
_library.impl("complex_number", _complex_number, "CompositeImplicitAutograd")
