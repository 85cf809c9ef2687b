"""Knows which functions of torch hand Python what a trace cannot follow, and whose code calls them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import Frame, is_foreign, is_only_message, is_ours, users_line

_C: Any = torch._C
TAKE_NO_BOOLS = frozenset(
    {torch.Tensor.ne, torch.Tensor.eq, torch.ne, torch.eq, torch.Tensor.__eq__, torch.Tensor.__ne__}
    | {torch.Tensor.masked_fill, torch.Tensor.masked_fill_, torch.masked_fill, torch.Tensor.fill_}
    | {torch.Tensor.index_fill, torch.Tensor.index_fill_, torch.index_fill, torch.Tensor.scatter, torch.scatter}
)
"""Functions whose Python numbers decide nothing about the type of the result."""
_OBSERVERS = (
    *(os.path.join("compat", f"{name}.py") for name in ("tracing", "traced_calls", "traced_vmap")),
    "overrides.py",
)
"""Ends of the names of the files that a function passes through before a ``TorchFunctionMode`` sees it."""
_ON_THE_WAY = (*_OBSERVERS, "_tensor.py")
"""Ends of the names of the files between the user's code and a function that the mode sees."""
MOST_VALUES = 256
"""Maximum number of elements of a tensor that Python may read as a setting; a larger tensor is data."""
READS: dict[Any, str] = {
    torch.Tensor.__bool__: "takes a tensor for a Python bool",
    torch.Tensor.__int__: "takes a tensor for a Python int",
    torch.Tensor.__float__: "takes a tensor for a Python float",
    torch.Tensor.__index__: "takes a tensor for a Python int",
    torch.Tensor.item: "takes a tensor for a Python number",
    torch.Tensor.__complex__: "takes a tensor for a Python number",
    torch.Tensor.__contains__: "looks for a value in a tensor",
    torch.Tensor.tolist: "takes a tensor for a Python list",
    **dict.fromkeys((torch.Tensor.is_nonzero, torch.is_nonzero), "takes a tensor for a Python bool"),
    **dict.fromkeys((torch.Tensor.numpy, torch.Tensor.__array__), "takes a tensor for a NumPy array"),
    torch.Tensor.__dlpack__: "hands the memory of a tensor to another library",
}
EQUALITIES: dict[Any, Any] = {
    **dict.fromkeys((torch.Tensor.equal, torch.equal), torch.eq),
    **dict.fromkeys((torch.Tensor.allclose, torch.allclose), torch.isclose),
}
"""Functions that compare tensors for Python, to those that do so for each element."""
COUNTING = frozenset({torch.Tensor.add_, torch.Tensor.__iadd__})
"""Functions by which a normalisation module counts its batches, in place."""
CHECKING = frozenset(function for name, function in vars(torch.nn.functional).items() if "dropout" in name)
"""Functions that compare their numbers with limits before they take them for Python numbers."""
EMBEDDINGS = frozenset((torch.nn.functional.embedding, torch.nn.functional.embedding_bag))
"""Functions that may scale the weight that they are given."""
FORMATTING = frozenset({torch.Tensor.__repr__, torch.Tensor.__format__})
"""Functions that make a text of a tensor."""
STORAGES = frozenset({torch.Tensor.untyped_storage, torch.Tensor.storage})
BOOKKEEPING = frozenset({"_version", "requires_grad", "grad_fn", "is_leaf", "layout"})
"""Properties of a tensor that say nothing about its values."""
COUNTS: dict[Any, str] = {
    torch.Tensor.__iter__: "loops over a tensor",
    torch.Tensor.__len__: "takes the length of a tensor",
    **dict.fromkeys((torch.Tensor.unbind, torch.unbind), "takes a tensor apart"),
    **dict.fromkeys((torch.Tensor.split, torch.split, torch.Tensor.chunk, torch.chunk), "takes a tensor apart"),
}
"""Functions whose number of results depends on the shape of their argument."""


def switched(func: Any, args: tuple, kwargs: dict) -> bool | None:
    """Return what a call makes of ``requires_grad`` of a parameter; None if it does nothing of the kind."""
    property_ = getattr(getattr(func, "__self__", None), "__name__", "")
    setter = getattr(func, "__name__", "") == "__set__" and property_ == "requires_grad"
    if not (setter or func is torch.Tensor.requires_grad_) or not isinstance(args[0], torch.nn.Parameter):
        return None
    return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))


def is_users_call(frame: FrameType | None) -> bool:
    """Return whether the user's code calls what the mode sees, for more than a message."""
    while frame is not None and frame.f_code.co_filename.endswith(_ON_THE_WAY):
        frame = frame.f_back
    return frame is not None and not is_foreign(frame.f_code.co_filename) and not is_only_message(frame, text=False)


def is_called_by_us() -> bool:
    """Return True if code of ort_zero or DeepSpeed calls the function that the mode sees."""
    frames = (frame.filename for frame in reversed(traceback.extract_stack()))
    caller = next(name for name in frames if not name.endswith(_ON_THE_WAY))
    return is_ours(caller)


def is_read_by_ort() -> bool:
    """Return True if a hook of ORTModule reads: it looks how much of a batch is padding, and both answers are right."""
    frames = (frame.filename for frame in reversed(traceback.extract_stack()))
    caller = next(name for name in frames if not name.endswith(_OBSERVERS))
    return "onnxruntime" in caller


def forward_line(module: torch.nn.Module | None) -> str:
    """Return where the forward of a module begins, as :func:`user_line` would."""
    code = getattr(getattr(module, "forward", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in forward" if code is not None else "unknown line"


def user_line() -> str:
    """Return "FILE:LINE in FUNCTION" of the model's code that runs."""
    stack = (Frame(f.filename, f.lineno or 0, f.name) for f in traceback.extract_stack())
    return users_line(stack) or "unknown line"


def running_modules(frame: FrameType | None) -> Iterator[torch.nn.Module]:
    """Yield the modules whose calls are under way in `frame` and around it, innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


_CALL = torch.nn.Module._call_impl.__code__
