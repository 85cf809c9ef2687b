"""Bind memory to a session without a new record of the device for each tensor.

``IOBinding.bind_input`` and ``bind_output`` look the device up by name at every call (ONNX Runtime 1.19 to 1.32), which
takes longer than the binding itself.
"""

from __future__ import annotations

from typing import Any

import onnxruntime


def device_arguments(kind: str, number: int) -> tuple[Any, ...]:
    """Return what stands for a device in calls of :func:`binder`: its record, or kind and number in public calls."""
    try:
        return (onnxruntime.OrtDevice.make(kind, number)._get_c_device(),)
    except AttributeError:
        return kind, number


def binder(binding: Any, device: tuple[Any, ...]) -> Any:
    """Return the object whose ``bind_input`` and ``bind_output`` take the arguments of a device after the name."""
    return binding._iobinding if len(device) == 1 else binding
