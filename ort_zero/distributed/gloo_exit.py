"""Let gloo's worker threads finish before the interpreter ends.

A worker needs the GIL to drop a finished collective's tensors. If ``Py_FinalizeEx`` comes first, CPython ends it inside
C++ code: "terminate called without an active exception" (torch 2.13, plain PyTorch too).
``destroy_process_group`` joins no workers while other objects, such as DeepSpeed's modules, refer to a group.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time

_SECONDS = 0.1


@functools.cache
def settle_at_exit() -> None:
    """Register :func:`settle` to run at exit, once."""
    atexit.register(settle)


def settle() -> None:
    """Release the GIL for a moment if gloo may be in use: a worker that waits for the GIL gets it at once."""
    if "torch.distributed" in sys.modules:
        time.sleep(_SECONDS)
