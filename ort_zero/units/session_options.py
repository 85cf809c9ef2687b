"""Options that ONNX Runtime's sessions of all engines share: threads, one memory arena, the recording of nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import onnxruntime
import torch

_profiling: dict[str, Any] = {"prefix": None, "session_made": None}
_numbers = itertools.count()
_with_arena: set[torch.device] = set()
"""Devices whose allocator is registered with ONNX Runtime, for all sessions of this process."""


def session_options(threads: int) -> Any:
    """Return options for one session, as an ``onnxruntime.SessionOptions``.

    Args:
        threads: number of threads of one operator.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if _profiling["prefix"] is not None:
        options.enable_profiling = True
        options.profile_file_prefix = f"{_profiling['prefix']}.{next(_numbers)}"
    # all sessions take their memory from one arena; each its own would keep the peaks of all
    options.add_session_config_entry("session.use_env_allocators", "1")
    # spinning threads would take the cores from PyTorch's
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def profile(prefix: str | None, session_made: Callable[[Any], None] | None) -> None:
    """Have sessions that are made from now on record their nodes; None ends that.

    Args:
        prefix: beginning of the names of the files that sessions write.
        session_made: called with each new session.
    """
    _profiling["prefix"], _profiling["session_made"] = prefix, session_made


def report_session(session: Any) -> None:
    """Pass a new session of an engine to the function that :func:`profile` was given."""
    if _profiling["session_made"] is not None:
        _profiling["session_made"](session)


def register_arena(device: torch.device, provider: str) -> None:
    """Register ONNX Runtime's allocator of a device in this process, from which all sessions take memory.

    Args:
        device: the device of the sessions' tensors.
        provider: name of ONNX Runtime's provider for the device.
    """
    if device in _with_arena:
        return
    _with_arena.add(device)
    arena, kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    as_requested = onnxruntime.OrtArenaCfg(0, 1, -1, -1)
    if device.type == "cpu":
        memory = onnxruntime.OrtMemoryInfo("Cpu", arena, 0, kind)
        onnxruntime.create_and_register_allocator(memory, as_requested)
        return
    memory = onnxruntime.OrtMemoryInfo(device.type.capitalize(), arena, device.index or 0, kind)
    onnxruntime.create_and_register_allocator_v2(provider, memory, {}, as_requested)
