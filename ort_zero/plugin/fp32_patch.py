"""Make DeepSpeed's own functions for a whole fp32 state dict read checkpoints of ort_zero's format.

The functions of ``deepspeed.utils.zero_to_fp32`` all read through one, which is patched, so that earlier imports of
the others work as well.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

from ort_zero.compat import deepspeed as ds_compat
from ort_zero.utils.patching import Patch, around


def _ours_or(ours: Callable[..., Any], original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `ours` for the folder of a checkpoint of ort_zero's format, else `original`."""
    from ort_zero.checkpoint import zero_to_fp32

    folder, *rest = inspect.signature(original).bind(*args, **kwargs).args
    return ours(folder, *rest) if zero_to_fp32.is_ours(folder) else original(folder, *rest)


def _read_fp32_state(folder: str, exclude_frozen_parameters: bool) -> Any:
    from ort_zero.checkpoint import zero_to_fp32
    from ort_zero.checkpoint.finding import find_source

    return zero_to_fp32.stored_weights(find_source(folder), exclude_frozen_parameters)


def _find_optimizer_files(folder: str) -> list[Any]:
    from ort_zero.checkpoint import zero_to_fp32

    return [zero_to_fp32.stage_file(folder, _folder())]


def _find_model_file(folder: str, zero_stage: int) -> Any:
    from ort_zero.checkpoint import zero_to_fp32

    return zero_to_fp32.client_state_file(folder, _folder())


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="ort_zero_client_state_")


def _folder() -> str:
    """Return a new folder that is removed when the process ends."""
    return tempfile.mkdtemp(dir=_temporary_folder().name)


PATCHES = tuple(
    Patch(
        target=target,
        build=around(functools.partial(_ours_or, ours)),
        why="reads sharded checkpoints",
        guard=ds_compat.takes(*arguments),
    )
    for target, ours, *arguments in (
        (ds_compat.READ_FP32_STATE, _read_fp32_state, "ds_checkpoint_dir", "exclude_frozen_parameters"),
        (ds_compat.FIND_OPTIMIZER_FILES, _find_optimizer_files, "checkpoint_dir"),
        (ds_compat.FIND_MODEL_FILE, _find_model_file, "checkpoint_dir", "zero_stage"),
    )
)
