"""The settings of PyTorch that a program may ask for: deterministic algorithms, threads, flags of backends."""

from __future__ import annotations

import os
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from ort_zero.ortmodule.compat.frames import is_foreign

_C: Any = torch._C
_NAMES = (
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "get_num_threads",
    "is_grad_enabled",
    "_get_float32_matmul_precision",
    "_get_cublas_allow_tf32",
    "_get_cudnn_allow_tf32",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cudnn_enabled",
    "_get_mkldnn_enabled",
    "_get_flash_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
)
READS: dict[Any, str] = {getattr(_C, name): name for name in _NAMES if hasattr(_C, name)}
"""The functions that look one up, each with the name of the setting."""
_OF_RANKS = {"get_rank": dist.get_rank, "get_world_size": dist.get_world_size} if dist.is_available() else {}
RANKS: dict[CodeType, str] = {function.__code__: name for name, function in _OF_RANKS.items()}
"""The code of the functions that tell which rank of how many this process is, with their names."""
_TORCH = os.path.dirname(torch.__file__)
_WRAPPERS = (os.path.join(_TORCH, "__init__.py"), os.path.join(_TORCH, "backends") + os.sep)
"""Beginnings of the names of the files whose functions look settings up for others."""


_LAYERS = os.path.join(_TORCH, "nn", "modules") + os.sep


def is_of_layers(code: CodeType) -> bool:
    """Return whether code is that of PyTorch's own layers."""
    return code.co_filename.startswith(_LAYERS)


def asked_by_user(frame: FrameType | None) -> bool:
    """Return whether the user's code asks for the setting that the function in `frame` looks up."""
    while frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and not is_foreign(frame.f_code.co_filename)


class Settings:
    """Looks up settings as items, by the names of :data:`READS` and :data:`RANKS`."""

    def __getitem__(self, name: str) -> Any:
        if name in _OF_RANKS:
            return _OF_RANKS[name]() if dist.is_initialized() else -1
        return getattr(_C, name)()
