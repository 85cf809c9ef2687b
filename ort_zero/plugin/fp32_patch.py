"""Lets DeepSpeed's own functions for a whole fp32 state dict read checkpoints of our format.

``get_fp32_state_dict_from_zero_checkpoint``, ``load_state_dict_from_zero_checkpoint`` and the conversions of
``deepspeed.utils.zero_to_fp32`` all read through one function of that module, which is patched: so they work also for
those who have imported them before.
"""

from __future__ import annotations

import functools

from ort_zero.compat import deepspeed as ds_compat
from ort_zero.errors import PatchError
from ort_zero.log import get_logger
from ort_zero.utils.patching import Patch, resolve


def _read_fp32_state(original):
    @functools.wraps(original)
    def read(ds_checkpoint_dir, exclude_frozen_parameters):
        from ort_zero.checkpoint import zero_to_fp32
        from ort_zero.checkpoint.opening import open_checkpoint

        if not zero_to_fp32.is_ours(ds_checkpoint_dir):
            return original(ds_checkpoint_dir, exclude_frozen_parameters)
        return zero_to_fp32.stored_weights(open_checkpoint(ds_checkpoint_dir), exclude_frozen_parameters)

    return read


_PATCH = Patch(
    target=ds_compat.READ_FP32_STATE,
    build=_read_fp32_state,
    why="reads sharded checkpoints",
    guard=ds_compat.require_fp32_reader,
)


def patches() -> tuple[Patch, ...]:
    """Return the patch; none where DeepSpeed's function has another shape: nothing else depends on it."""
    try:
        ds_compat.require_fp32_reader(resolve(_PATCH.target))
    except PatchError as error:
        get_logger().info("deepspeed.utils.zero_to_fp32 will not read sharded checkpoints of ort_zero: %s", error)
        return ()
    return (_PATCH,)
