"""Decides whether what DeepSpeed writes into a file of module states has the types that it has there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ort_zero.checkpoint.restricted_pickle.values import StoredTensor

_COUNTS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")
_MOST = 1 << 53
"""Bound of a count of steps, samples or ranks."""
_MOST_DIMENSIONS = 64


def wrong_in_module_file(content: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the content of a file of module states; None for nothing.

    Args:
        content: what the file holds.
    """
    for key in _COUNTS:
        value = content.get(key)
        if value is not None and not (type(value) is int and 0 <= value < _MOST):
            return f"{key} cannot be {_shown(value)}"
    buffers = content.get("buffer_names")
    if buffers is not None and not (isinstance(buffers, (list, tuple)) and all(map(_is_name, buffers))):
        return f"buffer_names cannot be {_shown(buffers)}"
    tied = content.get("shared_params")
    if tied is not None and not (
        isinstance(tied, dict) and all(_is_name(name) and _is_name(other) for name, other in tied.items())
    ):
        return f"shared_params cannot be {_shown(tied)}"
    module = content.get("module") or {}
    strange = next((name for name in module if not _is_name(name)), None)
    if strange is not None:
        return f"a name in the module cannot be {_shown(strange)}"
    no_tensor = next((name for name in buffers or () if not isinstance(module.get(name, _HOLDER), StoredTensor)), None)
    if no_tensor is not None:
        return f"the buffer {no_tensor} is no dense tensor"
    return _wrong_shapes(content)


_HOLDER = StoredTensor(offset=0, dtype="float32", shape=(0,), strides=(1,), storage_offset=0)


def _wrong_shapes(content: Mapping[str, Any]) -> str | None:
    shapes = content.get("param_shapes")
    groups = [] if shapes is None else shapes if isinstance(shapes, (list, tuple)) else [shapes]
    frozen = content.get("frozen_param_shapes")
    for group in (*groups, *([] if frozen is None else [frozen])):
        if not isinstance(group, dict):
            return f"the shapes of parameters cannot be {_shown(group)}"
        for name, shape in group.items():
            if not _is_name(name):
                return f"the name of a parameter cannot be {_shown(name)}"
            if not _is_shape(shape):
                return f"the shape of {name} cannot be {_shown(shape)}"
    fragments = content.get("frozen_param_fragments")
    return None if fragments is None or isinstance(fragments, dict) else "frozen_param_fragments is no table"


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) <= _MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )


def _shown(value: object) -> str:
    return repr(value)[:200]
