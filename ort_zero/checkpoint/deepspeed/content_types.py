"""Check the types of the values in a file of DeepSpeed's module states. Opens no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ort_zero.checkpoint.restricted_pickle.values import StoredTensor

_COUNTS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")
_MAX_COUNT = 1 << 53
"""Counts of steps, samples or ranks must be smaller."""
_MAX_DIMENSIONS = 64


def wrong_in_module_file(content: Mapping[str, Any]) -> str | None:
    """Return a message on the first wrong value in a file of module states; None if there is none.

    Args:
        content: content of the file.
    """
    for key in _COUNTS:
        value = content.get(key)
        if value is not None and not (type(value) is int and 0 <= value < _MAX_COUNT):
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
    bad_name = next((name for name in module if not _is_name(name)), None)
    if bad_name is not None:
        return f"a name in the module cannot be {_shown(bad_name)}"
    no_tensor = next((name for name in buffers or () if not isinstance(module.get(name, _EMPTY), StoredTensor)), None)
    if no_tensor is not None:
        return f"the buffer {no_tensor} is no dense tensor"
    return _wrong_shapes(content)


_EMPTY = StoredTensor(offset=0, dtype="float32", shape=(0,), strides=(1,), storage_offset=0)


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
    return None if fragments is None or isinstance(fragments, dict) else "frozen_param_fragments is no dict"


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )


def _shown(value: object) -> str:
    return repr(value)[:200]
