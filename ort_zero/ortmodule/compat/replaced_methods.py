"""Methods that a program has put into ``torch.Tensor``, as modes for functions of torch see them.

A method in C that is called while such a mode is on tells the mode who it is by looking its own name up in
``torch.Tensor`` (``handle_torch_function`` in ``torch/csrc/utils/python_arg_parser.cpp``, torch 2.13). Where a program
has put a function there that calls the method, the mode is given that function instead, and would run it twice.
"""

from __future__ import annotations

import os
from types import FunctionType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_IN_PYTHON = {
    name: method
    for name, method in vars(torch.Tensor).items()
    if type(method) is FunctionType and method.__code__.co_filename.startswith(_TORCH)
}
"""The methods that torch defines in Python: they tell a mode what stands in ``torch.Tensor`` too."""


def called_method(func: Any) -> Any:
    """Return the function of torch that has called a mode, given what the mode was told."""
    func = getattr(func, "unobserved", func)
    if type(func) is not FunctionType or func.__code__.co_filename.startswith(_TORCH):
        return func
    for name, value in vars(torch.Tensor).items():
        if value is func or getattr(value, "unobserved", None) is func:
            below = getattr(torch._C.TensorBase, name, func)
            return _IN_PYTHON.get(name, func if below is getattr(object, name, None) else below)
    return func
