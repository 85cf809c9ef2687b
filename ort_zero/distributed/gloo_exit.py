"""Let gloo's worker threads finish before the interpreter ends.

A worker of ``ProcessGroupGloo`` needs the GIL to drop the last reference to a finished collective's tensors, after it
has woken the caller. If the process reaches ``Py_FinalizeEx`` first, CPython ends that thread inside C++ code, which
ends the process: "terminate called without an active exception" (torch 2.13, Python 3.11, plain PyTorch too).
``destroy_process_group`` does not join the workers while other objects, such as DeepSpeed's modules, refer to a group.
"""

from __future__ import annotations

import atexit
import sys
import time

_SECONDS = 0.1
_registered = False


def settle_at_exit() -> None:
    """Register :func:`settle` to run at exit; a second call does nothing."""
    global _registered
    if not _registered:
        atexit.register(settle)
        _registered = True


def settle() -> None:
    """Release the GIL for a moment if gloo may be in use: a worker that waits for the GIL gets it at once."""
    if "torch.distributed" in sys.modules:
        time.sleep(_SECONDS)
