"""Refuse an engine whose config has an enabled section, with the reason why ort_zero could not be enabled."""

from __future__ import annotations

from ort_zero import config
from ort_zero.compat import deepspeed as ds_compat
from ort_zero.errors import PatchError
from ort_zero.utils.patching import Patch


def patch(reason: str) -> Patch:
    """Return the patch that raises `reason` for an engine whose config has an enabled section, and only then."""

    def __init__(original, self, *args, **kwargs):
        _, ds_config = ds_compat.config_of(original, self, args, kwargs)
        if config.section_of(ds_config) is not None:
            raise PatchError(
                f'the DeepSpeed config has an "{config.SECTION}" section, but ort_zero is not enabled: {reason}. '
                f'Remove the section (or set "enabled": false in it) to train with plain DeepSpeed'
            )
        return original(self, *args, **kwargs)

    why = "a section that cannot be honoured is refused"
    return Patch.in_module(ds_compat.ENGINE, "DeepSpeedEngine.__init__", __init__, why)
