"""Read the shapes, sizes and numbers of whole parameters and of parameters that ZeRO-3 partitions. DeepSpeed 0.19."""

from __future__ import annotations

from typing import Any

from ort_zero.compat.torch_modules import parameters_of


def is_partitioned(parameter: Any) -> bool:
    """Return True if ZeRO-3 manages the parameter."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter."""
    return tuple(parameter.ds_shape) if is_partitioned(parameter) else tuple(parameter.shape)


def full_size(parameter: Any) -> int:
    """Return the number of elements of the whole parameter."""
    return int(parameter.ds_numel) if is_partitioned(parameter) else parameter.numel()


def elements_of(module: Any) -> int:
    """Return the number of elements of all parameters below a module; a partitioned parameter counts whole."""
    return sum(map(full_size, parameters_of(module)))


def number_of(parameter: Any) -> int | None:
    """Return the number by which DeepSpeed's messages name a partitioned parameter, None for any other."""
    return getattr(parameter, "ds_id", None)
