"""Make DeepSpeed before 0.19 wait for all parameters that it gathers together on CPUs.

It waits for the last ``all_gather`` alone, but those of gloo end in any order. Parameters may then be uninitialized
memory: in ``deepspeed.zero.GatheredParameters``, and the persistent ones after each step.
"""

from __future__ import annotations

import inspect
from typing import Any

from ort_zero.errors import PatchError
from ort_zero.utils.patching import Patch, resolve

_MODULE = "deepspeed.runtime.zero.partition_parameters"
_NAME = "Init._allgather_params_coalesced"
TARGET = f"{_MODULE}:{_NAME}"
_WAITS_FOR_THE_LAST = "launch_handles[-1].wait()"


def patches() -> tuple[Patch, ...]:
    """Return the patch that the installed DeepSpeed needs on this device; none if it waits for each gather."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu" or not _waits_for_the_last():
        return ()
    return (Patch.in_module(_MODULE, _NAME, _one_by_one, "gathered parameters are waited for"),)


def _waits_for_the_last() -> bool:
    try:
        return _WAITS_FOR_THE_LAST in inspect.getsource(resolve(TARGET))
    except PatchError:
        return False  # a later DeepSpeed, which gathers in another way
    except OSError:
        return True  # no source to check; one gather at a time is right for every version


def _one_by_one(original: Any, self: Any, param_list: Any, *args: Any, **kwargs: Any) -> None:
    """Call `original` for one parameter at a time, and so wait for each gather."""
    for parameter in param_list:
        original(self, [parameter], *args, **kwargs)
