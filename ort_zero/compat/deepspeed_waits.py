"""Lets DeepSpeed before 0.19 wait for all parameters that it gathers together on CPUs.

There ``Init._allgather_params_coalesced`` starts one ``all_gather`` for each parameter and waits for the last alone. On
a stream of CUDA that means all of them; gloo's end in any order. What it fills is the parameters in
``deepspeed.zero.GatheredParameters``, and after each step those that stay whole
(``stage3_param_persistence_threshold``): without this they may hold memory that was not initialized.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ort_zero.errors import PatchError
from ort_zero.utils.patching import Patch, defined_in, resolve

_MODULE = "deepspeed.runtime.zero.partition_parameters"
TARGET = f"{_MODULE}:Init._allgather_params_coalesced"
_WAITS_FOR_THE_LAST = "launch_handles[-1].wait()"


def patches() -> tuple[Patch, ...]:
    """Return the patch that the installed DeepSpeed needs on this device; none where it waits for each gather."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu" or not _waits_for_the_last():
        return ()
    return (
        Patch(
            target=TARGET,
            build=one_by_one,
            why="gathered parameters are waited for",
            guard=defined_in(_MODULE),
        ),
    )


def _waits_for_the_last() -> bool:
    try:
        return _WAITS_FOR_THE_LAST in inspect.getsource(resolve(TARGET))
    except PatchError:
        return False  # a later DeepSpeed, which gathers in another way
    except OSError:
        return True  # no source to look at; one by one is right for either


def one_by_one(original: Any) -> Any:
    """Return `original` with a call for each parameter: the last gather is then the only one.

    Args:
        original: gathers the parameters of a list, and has waited for the last of them when it returns.
    """

    @functools.wraps(original)
    def gather(self: Any, param_list: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in param_list:
            original(self, [parameter], *args, **kwargs)

    return gather
