"""Make DeepSpeed's own functions for a whole fp32 state dict read checkpoints of ort_zero's format.

``get_fp32_state_dict_from_zero_checkpoint``, ``load_state_dict_from_zero_checkpoint`` and the conversions of
``deepspeed.utils.zero_to_fp32`` all read through one function of that module. That function is patched, so that
earlier imports of the others work as well.
"""

from __future__ import annotations

import functools
import tempfile

from ort_zero.compat import deepspeed as ds_compat
from ort_zero.errors import PatchError
from ort_zero.log import get_logger
from ort_zero.utils.patching import Patch, resolve


def _read_fp32_state(original):
    @functools.wraps(original)
    def read(ds_checkpoint_dir, exclude_frozen_parameters):
        from ort_zero.checkpoint import zero_to_fp32
        from ort_zero.checkpoint.finding import find_source

        if not zero_to_fp32.is_ours(ds_checkpoint_dir):
            return original(ds_checkpoint_dir, exclude_frozen_parameters)
        return zero_to_fp32.stored_weights(find_source(ds_checkpoint_dir), exclude_frozen_parameters)

    return read


def _find_optimizer_files(original):
    @functools.wraps(original)
    def find(checkpoint_dir):
        from ort_zero.checkpoint import zero_to_fp32

        if not zero_to_fp32.is_ours(checkpoint_dir):
            return original(checkpoint_dir)
        return [zero_to_fp32.stage_file(checkpoint_dir, _folder())]

    return find


def _find_model_file(original):
    @functools.wraps(original)
    def find(checkpoint_dir, zero_stage):
        from ort_zero.checkpoint import zero_to_fp32

        if not zero_to_fp32.is_ours(checkpoint_dir):
            return original(checkpoint_dir, zero_stage)
        return zero_to_fp32.client_state_file(checkpoint_dir, _folder())

    return find


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="ort_zero_client_state_")


def _folder() -> str:
    """Return a new folder that is removed when the process ends."""
    return tempfile.mkdtemp(dir=_temporary_folder().name)


_PATCHES = tuple(
    Patch(target=target, build=build, why="reads sharded checkpoints", guard=guard)
    for target, build, guard in (
        (ds_compat.READ_FP32_STATE, _read_fp32_state, ds_compat.require_fp32_reader),
        (ds_compat.FIND_OPTIMIZER_FILES, _find_optimizer_files, ds_compat.require_file_finder),
        (ds_compat.FIND_MODEL_FILE, _find_model_file, ds_compat.require_file_finder),
    )
)


def patches() -> tuple[Patch, ...]:
    """Return the patches; none if DeepSpeed's functions have other arguments: no other part depends on the patches."""
    try:
        for patch in _PATCHES:
            assert patch.guard is not None
            patch.guard(resolve(patch.target))
    except PatchError as error:
        get_logger().info("deepspeed.utils.zero_to_fp32 will not read sharded checkpoints of ort_zero: %s", error)
        return ()
    return _PATCHES
