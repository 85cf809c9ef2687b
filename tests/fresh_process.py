"""Run code in a fresh process, with helpers that look at DeepSpeed's objects."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

HELPERS = """
import sys
def snapshot():
    import deepspeed.runtime.engine as e
    import deepspeed.runtime.zero.parameter_offload as p
    owners = (e.DeepSpeedEngine, p.DeepSpeedZeRoOffload)
    return [dict(vars(owner)) for owner in owners]
def same(a, b):
    return all(x.keys() == y.keys() and all(x[k] is y[k] for k in x) for x, y in zip(a, b))
def patched():
    import deepspeed.runtime.engine as e
    return hasattr(e.DeepSpeedEngine.__init__, "__ort_zero_patch__")
def refused(call):
    from ort_zero.errors import OrtZeroError
    try:
        call()
    except OrtZeroError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")
"""


def run(code: str, **env: str) -> str:
    """Run `code` in a fresh process and return its stdout and stderr."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ORT_ZERO_", "TORCH_DEVICE_BACKEND"))}
    done = subprocess.run(
        [sys.executable, "-c", HELPERS + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=800,
        env={**clean, **env},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
