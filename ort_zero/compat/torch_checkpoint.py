"""Notices torch's and DeepSpeed's activation checkpointing while a module is traced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ort_zero.utils.patching import replaced

_ENTRIES = (
    # functools.partial(checkpoint) is common, so the entry itself may be bound already: what it calls is not
    ("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator"),
    ("torch.utils.checkpoint", "CheckpointFunction"),
    ("deepspeed.runtime.activation_checkpointing.checkpointing", "CheckpointFunction"),
)


@contextlib.contextmanager
def on_checkpointing(found: Callable[[], Any]) -> Iterator[None]:
    """Call `found` (which is to raise) wherever activation checkpointing begins inside the ``with`` block.

    The exporter would trace the non-reentrant form as if it were not there: right numbers, but no memory saved.
    """

    class _Trap:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return found()

        apply = __call__

    with contextlib.ExitStack() as replacements:
        for module_name, name in _ENTRIES:
            module = sys.modules.get(module_name)
            if module is not None and hasattr(module, name):
                replacements.enter_context(replaced(module, name, lambda _: _Trap()))
        yield
